"""Peak memory of `predict` beside that of training the same model with Adam, each a process of its own.

    python benchmarks/predict_memory.py [--width 4096] [--layers 4] [--rows 20000]

The model is an MLP of 64 inputs. A model of width 8 says what a process takes anyhow; it is subtracted. Predictions are of CSV,
which is read in pieces.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

MIB = 1 << 20


def peak(folder: Path, *arguments: str) -> float:
    """The largest resident set of a process that runs the verb, in MiB."""
    child = subprocess.Popen([sys.executable, "-m", "mpitrain", *arguments], cwd=folder, stdout=subprocess.DEVNULL,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return used.ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        line = ",".join(f"{value:.8f}" for value in np.random.default_rng(0).normal(size=64))
        (folder / "rows.csv").write_text((line + "\n") * options.rows)
        for width in (8, options.width):
            hidden = f"model.hidden=[{','.join([str(width)] * options.layers)}]"
            train = peak(folder, "train", hidden, "optimizer.name=adam", "train.steps=4", f"run.out=run{width}")
            found[width] = train, peak(folder, "predict", f"run{width}", "rows.csv", "--out", f"{width}.h5")
        parameters = 4 / MIB * (64 * options.width + (options.layers - 1) * options.width ** 2 + 10 * options.width)
        train, predict = (found[options.width][i] - found[8][i] for i in (0, 1))
        print(f"parameters {parameters:.0f} MiB, rows {(folder / 'rows.csv').stat().st_size / MIB:.0f} MiB of CSV: training "
              f"{found[options.width][0]:.0f} MiB, {train / parameters:.1f} times the parameters above a model of width 8; "
              f"predict {found[options.width][1]:.0f} MiB, {predict / parameters:.1f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
