"""What a person in a terminal sees of a run under mpirun: seconds to the first line, and the longest time without a new one.

    python benchmarks/terminal.py [--runs 3] [--ranks 2] [section.key=value ...]

Each run is `mpirun -n N python -m mpitrain train` in a pseudo-terminal of its own, some twenty seconds long; bars: 1 s and 2 s.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from launch import clean_environment, find_mpirun

RUN = ("model.name=mlp", "model.hidden=[512, 512]", "train.steps=4000", "train.batch_size=512", "train.eval_every=100000",
       "run.out=run")


def lines(ranks: int, options: list[str]) -> tuple[list[float], int]:
    """Seconds from the start to each line on the terminal, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pty.openpty()
        began, found = time.monotonic(), []
        process = subprocess.Popen([find_mpirun(), "-n", str(ranks), sys.executable, "-m", "mpitrain", "train", *RUN, *options],
                                   cwd=folder, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            while read := os.read(ours, 1 << 16):
                found += [time.monotonic() - began] * (b"\n" in read or b"\r" in read)
        except OSError:                                       # how Linux says that the other side is closed
            pass
        os.close(ours)
        return found, process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("options", nargs="*")
    asked = parser.parse_args()
    for _ in range(asked.runs):
        found, code = lines(asked.ranks, asked.options)
        gaps = [later - earlier for earlier, later in zip(found, found[1:])]
        if code or not gaps:
            print(f"exit code {code}, {len(found)} lines")
            return 1
        print(f"first line after {found[0]:.2f} s, {len(found)} in {found[-1]:.1f} s, longest time without one {max(gaps):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
