"""What pruning costs in accuracy: LeNet-5 on MNIST's 10,000 test images, the last fifth of them held out.

    python benchmarks/pruning.py t10k-images-idx3-ubyte.gz [--seeds 5] [--epochs 12] [--json FILE]

Each seed trains the dense net, and as long, from the same first values, the net that is pruned on the way: 90 % of all weights by
magnitude (global, cubic from the second epoch to the eighth of twelve), and 2:4 at half time. A change is in points, that of the
held-out accuracy at the end; the last line has medians over seeds, and the bars.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import accuracy

STEPS = 125                                       # of an epoch: 8,000 images in batches of 64
BARS = {"magnitude 90 %": -0.5, "2:4": -0.3}


def ways(epochs: int) -> dict[str, list[str]]:
    """The overrides of each way to train."""
    begin, end, middle = (STEPS * epochs * part // 12 for part in (2, 8, 6))
    return {"dense": [],
            "magnitude 90 %": ["shrink.prune=magnitude", "shrink.sparsity=0.9", "shrink.scope=global", f"shrink.begin={begin}",
                               f"shrink.end={end}", "shrink.every=25"],
            "2:4": ["shrink.prune=n:m", "shrink.pattern=2:4", f"shrink.begin={middle}", f"shrink.end={middle}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copy(accuracy.ROOT / "examples/mnist.toml", work)
        accuracy.run("data", "import", "idx", options.images.resolve(), "--out", "mnist", cwd=work)
        for seed in range(options.first, options.first + options.seeds):
            for name, more in ways(options.epochs).items():
                accuracy.run("train", "mnist.toml", "--quiet", "--overwrite", f"run.seed={seed}", "run.out=out",
                             f"train.epochs={options.epochs}", "checkpoint.best=false", *more, cwd=work)
                record = accuracy.results(work / "out")
                value = 100 * record["metrics"]["accuracy"]
                found.setdefault(name, []).append(value)
                zeros = record.get("pruned", {}).get("zeros", 0)
                line = {"seed": seed, "way": name, "accuracy": value, "points": value - found["dense"][-1], "zeros": zeros}
                print(f"seed {seed}  {name:15}  {value:.2f} %  {line['points']:+.2f} points  {zeros:,} zeros", flush=True)
                if options.json:
                    with open(options.json, "a") as file:
                        file.write(json.dumps(line) + "\n")
    for name, bar in BARS.items():
        points = statistics.median(a - b for a, b in zip(found[name], found["dense"]))
        print(f"{name}: median of {options.seeds} seeds {points:+.2f} points (bar {bar:+.1f})")


if __name__ == "__main__":
    main()
