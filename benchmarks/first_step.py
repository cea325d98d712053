"""Time from the command to the end of the first training step, caches warm, beside a PyTorch script that trains the same model.

    python benchmarks/first_step.py --rounds 7

Ours is `python -m mpitrain train run.toml`, with everything it does on the way: the configuration checked, the data file examined
by a child process, MPI started, the run folder opened. PyTorch's is the shortest script there is: import torch, read the arrays
from a .npy file, make the model and fused AdamW, one step, print the loss. Both are started alternately and timed from outside,
until the line about the first step arrives. A first start of each, which does not count, fills the caches: our native code, and
what Python compiles of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy reads, here and in the programs started)

# isort: split
import numpy as np

from mpitrain.bench.report import Report
from mpitrain.data import write_shards

ROOT = Path(__file__).resolve().parents[1]
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"rows": 512, "batch": 128, "config": 'name = "mlp"\ninputs = 784\nhidden = [1024, 1024]\noutputs = 10'},
    "gpt": {"rows": 64 * 200, "batch": 12,
            "config": 'name = "gpt"\nlayers = 4\nheads = 4\nwidth = 128\nblock = 64\nvocabulary = 65'},
}

CONFIG = """
[model]
{model}
[data]
path = "data"
validation = "tail:0.1"
[train]
steps = 1
batch_size = {batch}
[log]
every = 1
"""

TORCH = """
import sys
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
kind, folder, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "mlp":
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    x, y = (torch.from_numpy(np.load(f"{folder}/{name}.npy")[:batch]) for name in "xy")
else:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(128, bias=False), nn.LayerNorm(128, bias=False)
            self.qkv, self.out = nn.Linear(128, 384, bias=False), nn.Linear(128, 128, bias=False)
            self.wide, self.narrow = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)

        def forward(self, x):
            q, k, v = (t.view(len(x), 64, 4, 32).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(128, 2))
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(heads.transpose(1, 2).reshape(len(x), 64, 128))
            return x + self.narrow(F.gelu(self.wide(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(65, 128), nn.Embedding(64, 128)
            self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(4))), nn.LayerNorm(128, bias=False)

        def forward(self, x):
            x = self.norm(self.blocks(self.token(x) + self.place(torch.arange(64))))
            return (x @ self.token.weight.T).view(-1, 65)

    model = GPT()
    tokens = torch.from_numpy(np.load(f"{folder}/x.npy").astype(np.int64))
    x = torch.stack([tokens[64 * i:64 * i + 64] for i in range(batch)])
    y = torch.stack([tokens[64 * i + 1:64 * i + 65] for i in range(batch)]).view(-1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loss = F.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
print(f"step 1/1  loss {loss.item():.4f}", flush=True)
"""


def prepare(folder: Path, model: str) -> list[list[str]]:
    """Writes the data and both programs; the two commands."""
    rng, about = np.random.default_rng(0), MODELS[model]
    if model == "mlp":
        x, y = rng.standard_normal((about["rows"], 784), dtype=np.float32), rng.integers(0, 10, about["rows"])
        np.save(folder / "y.npy", y)
    else:
        x, y = rng.integers(0, 65, about["rows"]).astype(np.uint16), None
    np.save(folder / "x.npy", x)
    write_shards(folder / "data", x, y, kind="tokens" if y is None else "classification")
    (folder / "run.toml").write_text(CONFIG.format(model=about["config"], batch=about["batch"]))
    (folder / "peer.py").write_text(TORCH)
    return [[sys.executable, "-P", "-m", "mpitrain", "train", str(folder / "run.toml"), "--overwrite"],
            [sys.executable, str(folder / "peer.py"), model, str(folder), str(about["batch"])]]


def seconds_to_first_step(command: list[str], folder: Path) -> float:
    """From starting `command` until it has printed its line about step 1; it must end well."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seconds = next((time.perf_counter() - began for line in process.stdout if line.startswith("step 1/1")), None)
        process.stdout.read()
    if seconds is None or process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}" + (" and no step" if seconds is None else ""))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--json", type=Path, help="write one JSON object a model to this file")
    options = parser.parse_args()
    report = Report(0, options.json)
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folder = Path(scratch) / model
            folder.mkdir()
            commands = prepare(folder, model)
            for command in commands:
                seconds_to_first_step(command, folder)               # fills the caches
            pairs = [tuple(seconds_to_first_step(command, folder) for command in commands) for _ in range(options.rounds)]
            ratios = sorted(theirs / ours for ours, theirs in pairs)
            result = {"bench": "first_step", "model": model, "seconds": statistics.median(ours for ours, _ in pairs),
                      "torch_seconds": statistics.median(theirs for _, theirs in pairs), "ratio": statistics.median(ratios),
                      "ratio_low": ratios[len(ratios) // 4], "ratio_high": ratios[3 * len(ratios) // 4]}
            print(f"{model}, from the command to the first step, {options.rounds} pairs\n"
                  f"  ours     {result['seconds']:6.2f} s\n  PyTorch  {result['torch_seconds']:6.2f} s\n"
                  f"  ratio    {result['ratio']:.2f} (quartiles {result['ratio_low']:.2f} .. {result['ratio_high']:.2f})")
            report.record(result)


if __name__ == "__main__":
    main()
