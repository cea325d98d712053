"""What compressed gradients cost in accuracy: LeNet on MNIST, 4 workers simulated in one process, several seeds.

    python benchmarks/compressed_accuracy.py FOLDER_WITH_T10K_FILES --seeds 0 1 2 --epochs 8
    python benchmarks/compressed_accuracy.py FOLDER_WITH_T10K_FILES --ranks 4 --rows "dense,topk:0.01 warm-up 250"

The 10,000 digits of the test set: 8,000 to train on, the last 2,000 to measure. SGD with momentum and a cosine schedule; each of
4 workers has a quarter of each batch, and the sum of their gradients is what the exchange between ranks would give. With --ranks
there is an exchange: each run is `mpirun -n RANKS ... train` with comm.compress_force, and bytes are those that a rank posts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import nn, optim
from mpitrain.autograd import Tensor, no_grad
from mpitrain.models import MODELS
from mpitrain.nn import FlatStorage
from mpitrain.parallel.compress.compressor import STAGES, Piece, make_compressor
from mpitrain.parallel.compress.simulate import Workers

WORKERS, BATCH, MOMENTUM = 4, 64, 0.9
RUN = """
[model]
name = "lenet"
classes = 10
[data]
path = "mnist"
transform = ["scale"]
validation = "tail:0.2"
[optimizer]
name = "sgd"
lr = {lr}
momentum = 0.9
schedule = "cosine"
[train]
batch_size = 64
epochs = {epochs}
eval_every = 100000
stall_s = 0
[log]
every = 125
progress_s = 0
[checkpoint]
best = false
"""
ROWS = ("dense", "int8", "int4", "topk:0.01", "powersgd:4", "powersgd:2", "onebit", "topk:0.01 without feedback",
        "onebit without feedback")


def digits(folder: Path) -> tuple[Any, Any]:
    """float32 (10000, 1, 28, 28) from 0 to 1, and int64 (10000,)."""
    def read(name: str, header: int) -> Any:
        return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)
    images, labels = read("t10k-images-idx3-ubyte.gz", 16), read("t10k-labels-idx1-ubyte.gz", 8)
    return (images.astype(np.float32) / 255).reshape(-1, 1, 28, 28), labels.astype(np.int64)


def pieces_of(storage: FlatStorage) -> list[Piece]:
    """The parameters, and what lies between them."""
    found: list[Piece] = []
    ends = [segment.start for segment in storage.segments[1:]] + [storage.size]
    for segment, end in zip(storage.segments, ends):
        found.append(Piece(segment.name, segment.start, segment.stop, 0, segment.shape))
        if end > segment.stop:
            found.append(Piece("padding", segment.stop, end, 0, (end - segment.stop,)))
    return found


def batches(rng: np.random.Generator, count: int) -> Iterator[Any]:
    order = rng.permutation(count)
    for start in range(0, count - BATCH + 1, BATCH):
        yield np.split(order[start:start + BATCH], WORKERS)


def stages_of(row: str, storage: FlatStorage, seed: int) -> tuple[list[Workers], int]:
    """The workers of each stage of a warm-up and of what follows, which share their residuals; and how many steps it has."""
    words = row.split()
    if words[0] == "dense":
        return [], 0
    make, warmup = make_compressor(words[0]), int(words[words.index("warm-up") + 1]) if "warm-up" in words else 0
    makes = [wide for times in STAGES if warmup and (wide := make.wider(times)) is not None]
    found = [Workers(one, pieces_of(storage), WORKERS, seed=seed, feedback="without" not in words) for one in (*makes, make)]
    for workers in found[:-1]:
        workers.states = found[-1].states
    return found, warmup


def accuracy(row: str, seed: int, epochs: int, lr: float, after: int, data: tuple[Any, Any]) -> tuple[float, int]:
    """Per cent of the last 2,000 digits that are recognised, and bytes of a worker's messages in a step."""
    (x, y), train = data, 8000
    model = MODELS["lenet"](classes=10)
    storage = model.initialize(seed)
    optimizer, arena = optim.SGD(storage, lr=lr, momentum=MOMENTUM), storage.attach_gradients()
    stages, warmup = stages_of(row, storage, seed)
    steps, step, rng, sent = epochs * (train // BATCH), 0, np.random.default_rng(seed), 4 * storage.size
    for _ in range(epochs):
        for parts in batches(rng, train):
            gradients = []
            for rows in parts:
                optimizer.zero_grad()
                loss = nn.LOSSES["cross_entropy"]()(model(Tensor(x[rows])), y[rows])
                loss.backward()
                gradients.append(arena / np.float32(BATCH))          # the loss is a sum over rows
            if not stages or step < after:
                total = sum(gradients[1:], gradients[0])
            else:
                workers = stages[min((step - after) * (len(stages) - 1) // warmup, len(stages) - 1) if warmup else -1]
                total = workers.exchange(step, gradients)[0]
                sent = sum(map(len, workers.messages)) // WORKERS
            arena[...] = total
            optimizer.lr = lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.step()
            step += 1
    model.eval()
    with no_grad():
        found = np.argmax(model(Tensor(x[train:])).data, axis=1)
    return 100 * float((found == y[train:]).mean()), sent


def on_ranks(work: Path, row: str, seed: int, options: argparse.Namespace) -> tuple[float, int]:
    """The same of a run of that many ranks: accuracy at the end, and bytes a step of the rank that sent most, over all steps."""
    (work / "run.toml").write_text(RUN.format(lr=options.lr, epochs=options.epochs))
    name, words = row.split()[0], row.split()
    given = [] if name == "dense" else [f"comm.compress={name}", "comm.compress_force=true",
                                        f"comm.compress_after={options.after}"]
    given += ["comm.compress_feedback=false"] if "without" in words else []
    given += [f"comm.compress_warmup={words[words.index('warm-up') + 1]}"] if "warm-up" in words else []
    _quietly([str(Path(sys.executable).with_name("mpirun")), "-n", str(options.ranks), sys.executable, "-m", "mpitrain", "train",
              "run.toml", "--overwrite", "--quiet", f"run.seed={seed}", *given], work)
    lines = [json.loads(line) for line in (work / "runs/run/metrics.jsonl").read_text().splitlines()]
    sent = [line["wire_bytes"] for line in lines if "wire_bytes" in line]
    accuracy = [line["accuracy"] for line in lines if line.get("split") == "validation"][-1]
    return 100 * accuracy, round(sum(sent) / max(len(sent), 1))


def _quietly(command: list[str], work: Path) -> None:
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, help="train on so many ranks, in place of the simulation")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--after", type=int, default=0, help="dense steps at the start, as comm.compress_after")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return rows(options, Path(folder))


def rows(options: argparse.Namespace, work: Path) -> int:
    """A line for each row: means over seeds, and what is lost beside dense."""
    data, dense = digits(options.folder), None
    if options.ranks:
        images = str(options.folder.resolve())
        _quietly([sys.executable, "-m", "mpitrain", "data", "import", "idx", images, "--out", "mnist"], work)
    print(f"{'exchange':<30}{'bytes':>10}{'accuracy':>10}   of each seed", flush=True)
    for row in options.rows.split(","):
        began = time.perf_counter()
        found = [on_ranks(work, row, seed, options) if options.ranks else
                 accuracy(row, seed, options.epochs, options.lr, options.after, data) for seed in options.seeds]
        mean = statistics.mean(one for one, _ in found)
        dense = mean if row == "dense" else dense
        against = "" if dense is None else f"  {mean - dense:+.2f}"
        print(f"{row:<30}{found[0][1]:>10}{mean:>10.2f}   {' '.join(f'{one:.2f}' for one, _ in found)}{against}"
              f"   {time.perf_counter() - began:.0f} s", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"exchange": row, "bytes": found[0][1], "accuracy": [one for one, _ in found],
                                       "lr": options.lr, "epochs": options.epochs, "after": options.after,
                                       "workers": options.ranks or WORKERS, "seeds": options.seeds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
