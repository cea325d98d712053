"""Adapters of rank 8 against full tuning: a GPT learns tiny Shakespeare, then its text in small letters and words of today.

    python benchmarks/tune.py tinyshakespeare.txt [--steps 2000] [--tuning 300]

Prints the validation losses before and after, how far logits are from those of the merged run, and the optimizer's state. One
thread, one rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOML = """
[run]
seed = 1337
[model]
name = "gpt"
layers = 4
heads = 4
width = 128
block = 64
vocabulary = 65
[data]
path = "before"
validation = "tail:0.02"
[optimizer]
name = "adamw"
schedule = "cosine"
warmup_steps = 20
lr = 1e-3
[train]
batch_size = 12
threads = 1
"""
WORDS = {"thou": "you", "thee": "you", "thy": "your", "hath": "has", "doth": "does", "ye": "you"}


def mpitrain(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "mpitrain", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def loss(folder: Path, run: str, *keys: str) -> float:
    return float(json.loads(mpitrain(folder, "evaluate", run, *keys).splitlines()[-1])["loss"])


def state_bytes(run: Path) -> int:
    from mpitrain.checkpoint import store
    arrays = store.latest(run / "checkpoints", purpose=store.EVALUATE).arrays
    return sum(array.dtype.itemsize * _size(array.shape) for name, array in arrays.items()
               if name.startswith("optimizer/") and array.shape)


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for length in shape:
        n *= length
    return n


def logits(run: Path, precision: str) -> Any:
    """float64 (8, 64, 65) of a run's model for 8 texts drawn by chance, computed with its own parameters in `precision`."""
    from mpitrain.autograd import Tensor, no_grad
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load
    saved = load(run)
    model = make_model(saved.config)
    model.initialize(0, precision)
    for (_, own), (_, leaf) in zip(saved.model.named_parameters(), model.named_parameters()):
        leaf.array[...] = own.numpy()
        leaf.mark_changed()
    tokens = np.random.default_rng(0).integers(0, 65, (8, 64))
    with no_grad():
        return model.eval()(Tensor(tokens)).numpy().astype(np.float64)


def apart(folder: Path) -> dict[str, float]:
    """How far logits of the merged run are from those with adapters, and each from its own in float64: the largest difference as
    a part of the largest logit, and the norm of differences as a part of that of logits."""
    a, b, a64, b64 = (logits(folder / run, precision) for precision in ("float32", "float64") for run in ("lora", "merged"))
    return {f"{what}, as a part of the {of}": float(measure(x - y) / measure(x))
            for what, x, y in (("merged - adapters in float32", a, b), ("adapters, float32 - float64", a64, a),
                               ("merged, float32 - float64", b64, b), ("merged - adapters in float64", a64, b64))
            for of, measure in (("largest logit", lambda x: np.abs(x).max()), ("norm", np.linalg.norm))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tuning", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = options.text.read_text()
        letters = "".join(sorted(set(text))) + "\n"              # Both texts get the same numbers for their characters.
        changed = " ".join(WORDS.get(word, word) for word in text.lower().split(" "))
        for kind, content in (("before", text), ("after", changed)):
            (folder / f"{kind}.txt").write_text(letters + content)
            mpitrain(folder, "data", "import", "text", f"{kind}.txt", "--out", kind)
        (folder / "run.toml").write_text(TOML)
        mpitrain(folder, "train", "run.toml", f"train.steps={options.steps}", "run.out=base")
        start = ("run.toml", "data.path=after", "model.init_from=base", f"train.steps={options.tuning}")
        mpitrain(folder, "train", *start, "run.out=full")
        mpitrain(folder, "train", *start, "run.out=lora", "lora.rank=8", "optimizer.lr=3e-3")
        mpitrain(folder, "merge", "lora", "--out", "merged")
        found = {"base on its text": loss(folder, "base"), "base on the changed text": loss(folder, "base", "data.path=after"),
                 "full": loss(folder, "full"), "lora": loss(folder, "lora"), "merged": loss(folder, "merged")}
        distances = apart(folder)
        states = {run: state_bytes(folder / run) for run in ("full", "lora")}
    for what, value in found.items():
        print(f"{what}: loss {value:.6f}")
    for what, distance in distances.items():
        print(f"{what}: {distance:.2e}")
    print(f"lora - full: {found['lora'] - found['full']:+.4f}; optimizer state {states['lora']:,} of {states['full']:,} bytes, "
          f"{100 * states['lora'] / states['full']:.2f} %")


if __name__ == "__main__":
    main()
