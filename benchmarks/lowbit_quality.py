"""What weights in few bits cost in quality: held-out loss of a GPT on tiny Shakespeare, accuracy of LeNet-5 on MNIST.

    python benchmarks/lowbit_quality.py text tinyshakespeare.txt [--steps 2000] [--aware 150] [--json FILE]
    python benchmarks/lowbit_quality.py images t10k-images-idx3-ubyte.gz [--seeds 5] [--epochs 6] [--json FILE]

text: examples/shakespeare.toml, all linear layers and tables in each format (`--least 0`); then training for int4 from the same
run, against as many steps more of the floats, with the same rate. images: examples/mnist.toml, the last fifth of the test images
held out, medians over seeds. Each line has a figure, the change against floats and its bar. One rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import accuracy

LOSSES = {"int8": 0.005, "int8-dynamic": 0.005, "int4": 0.05, "int4-dynamic": 0.05, "int4 trained for": 0.02}
POINTS = {"int8": -0.15, "int8-dynamic": -0.15, "int4": -0.3, "int4-dynamic": -0.3}
SHARES = {"int8": 0.27, "int4": 0.16}
FORMATS = tuple(POINTS)


def told(*arguments: object) -> str:
    """What a verb prints."""
    return subprocess.run([sys.executable, "-m", "mpitrain", *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                          check=True).stdout


def evaluated(run: Path, metric: str) -> float:
    return float(json.loads(told("evaluate", run).splitlines()[-1])[metric])


def nbytes(run: Path) -> int:
    """Of the arrays of a run's model."""
    from mpitrain.train.build.saved import load
    storage = load(run).model.state_dict()
    return sum(array.nbytes for array in storage.values())


def quantized(run: Path, name: str) -> Path:
    out = run.with_name(f"{run.name}-{name}")
    told("quantize", run, "--format", name, "--least", 0, "--out", out)
    return out


def text(work: Path, source: Path, steps: int = 2000, aware: int = 150, formats: Sequence[str] = FORMATS) -> dict[str, float]:
    """Losses by format, "float32" among them; the shares of bytes as "int8 bytes", "int4 bytes"."""
    shutil.copy(accuracy.ROOT / "examples/shakespeare.toml", work)
    accuracy.run("data", "import", "text", source.resolve(), "--out", "shakespeare", cwd=work)

    def train(out: str, steps: int, *more: str) -> Path:
        accuracy.run("train", "shakespeare.toml", "--quiet", f"train.steps={steps}", f"run.out={out}", *more, cwd=work)
        return work / out
    base = train("base", steps)
    found = {"float32": evaluated(base, "loss")}
    for name in formats:
        few = quantized(base, name)
        found[name] = evaluated(few, "loss")
        if name in SHARES:
            found[f"{name} bytes"] = nbytes(few) / nbytes(base)
    more = ("model.init_from=base", "optimizer.lr=2e-4", "optimizer.warmup_steps=0")
    found["float32 trained on"] = evaluated(train("on", aware, *more), "loss")
    trained = train("aware", aware, *more, "shrink.quantize=int4", "shrink.least=0")
    found["int4 trained for"] = evaluated(quantized(trained, "int4"), "loss")
    return found


def images(work: Path, source: Path, seeds: int = 5, epochs: int = 6) -> dict[str, list[float]]:
    """Accuracies in percent by format, of each seed."""
    shutil.copy(accuracy.ROOT / "examples/mnist.toml", work)
    accuracy.run("data", "import", "idx", source.resolve(), "--out", "mnist", cwd=work)
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        accuracy.run("train", "mnist.toml", "--quiet", f"run.seed={seed}", f"run.out=lenet-{seed}", f"train.epochs={epochs}",
                     "checkpoint.best=false", cwd=work)
        run = work / f"lenet-{seed}"
        for name in ("float32", *FORMATS):
            found.setdefault(name, []).append(100 * evaluated(run if name == "float32" else quantized(run, name), "accuracy"))
    return found


def changes(found: dict[str, float]) -> dict[str, float]:
    """The change of each loss against that of floats with as many steps."""
    return {name: found[name] - found["float32 trained on" if "trained" in name else "float32"] for name in LOSSES
            if name in found}


def points(found: dict[str, list[float]]) -> dict[str, float]:
    """The median change in points of each format."""
    return {name: statistics.median(a - b for a, b in zip(found[name], found["float32"], strict=True)) for name in POINTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("text", "images"))
    parser.add_argument("source", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--aware", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.which == "text":
            losses = text(Path(folder), options.source, options.steps, options.aware)
            record: object = losses
            print(f"float32: {losses['float32']:.4f}; trained on: {losses['float32 trained on']:.4f}")
            for name, change in changes(losses).items():
                print(f"{name}: {losses[name]:.4f}, {change:+.4f} (bar {LOSSES[name]:+})")
            for name, share in SHARES.items():
                print(f"{name}: {losses[f'{name} bytes']:.3f} of the bytes (bar {share})")
        else:
            accuracies = images(Path(folder), options.source, options.seeds, options.epochs)
            record = accuracies
            for name, change in {"float32": 0.0, **points(accuracies)}.items():
                bar = f", {change:+.2f} points (bar {POINTS[name]})" if name in POINTS else ""
                print(f"{name}: median of {options.seeds} seeds {statistics.median(accuracies[name]):.2f} %{bar}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
