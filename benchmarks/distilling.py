"""What a teacher gives a small model: LeNet-5 on MNIST teaches a LeNet of a tenth of its work, by its predictions in a file.

    python benchmarks/distilling.py t10k-images-idx3-ubyte.gz [--seeds 5] [--images-to-learn 500] [--epochs 150] [--json FILE]

The teacher has 8,000 of the 10,000 test images to learn from, for 10 epochs; a student has the first 500 of these, and is
trained from the same first values with the labels alone, and with the teacher's outputs (T = 4, 0.9 of the loss). A change is in
points, that of the accuracy on the last 2,000 images, which neither has seen; the last line has the median over seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import accuracy
import h5py
import numpy as np

HELD_OUT = 2_000
WIDTHS = [2, 4, 24, 24]                           # of LeNet-5's [6, 16, 120, 84]: 3,530 parameters of 61,706


def prepare(work: Path, images: Path, n: int) -> None:
    """The teacher, and its predictions for the student's rows: `n` to learn from, and those that are held out."""
    shutil.copy(accuracy.ROOT / "examples/mnist.toml", work)
    accuracy.run("data", "import", "idx", images.resolve(), "--out", "mnist", cwd=work)
    accuracy.run("train", "mnist.toml", "--quiet", "run.out=teacher", cwd=work)
    with h5py.File(next((work / "mnist").glob("*.h5"))) as whole, h5py.File(work / "few.h5", "w") as few:
        rows = np.r_[:n, len(whole["x"]) - HELD_OUT:len(whole["x"])]
        few["x"], few["y"] = whole["x"][:][rows], whole["y"][:][rows]
    accuracy.run("predict", "teacher", "few.h5", "--out", "known.h5", cwd=work)


def student(work: Path, n: int, seed: int, epochs: int, *more: str) -> float:
    """The held-out accuracy of a student, in percent."""
    accuracy.run("train", "mnist.toml", "--quiet", "--overwrite", f"run.seed={seed}", "run.out=out", "data.path=few.h5",
                 f"data.validation=tail:{HELD_OUT / (n + HELD_OUT)}", f"model.widths={WIDTHS}", f"train.epochs={epochs}",
                 "train.eval_every=1000000", "checkpoint.best=false", *more, cwd=work)
    return 100 * float(accuracy.results(work / "out")["metrics"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images-to-learn", dest="n", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, options.images, options.n)
        print(f"teacher: {100 * accuracy.results(work / 'teacher')['metrics']['accuracy']:.2f} %", flush=True)
        for seed in range(options.seeds):
            alone = student(work, options.n, seed, options.epochs)
            taught = student(work, options.n, seed, options.epochs, "distil.predictions=known.h5", "distil.weight=0.9")
            changes.append(taught - alone)
            print(f"seed {seed}: labels alone {alone:.2f} %, taught {taught:.2f} %, {changes[-1]:+.2f} points", flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({"seed": seed, "alone": alone, "taught": taught}) + "\n")
    print(f"median of {options.seeds} seeds {statistics.median(changes):+.2f} points (bar > 0)")


if __name__ == "__main__":
    main()
