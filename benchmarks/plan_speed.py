"""Seconds of a plan of GPT-2 (12 layers, 1,024 positions, batches of 512) over all meshes of 512 and of 4,096 ranks.

    python benchmarks/plan_speed.py --ranks 512 4096

Each plan is a process of its own, as a user starts it, on one thread; the text it trains on is made from a seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
RUN = """
[model]
name = "gpt"
vocabulary = 50257
block = 1024
width = 768
layers = 12
heads = 12

[data]
path = "text"
validation = "tail:0.1"

[optimizer]
name = "adamw"

[train]
steps = 1000
batch_size = 512
precision = "bfloat16"
"""


def plan(folder: Path, ranks: int, machine: str) -> tuple[float, str]:
    """(seconds, the line that runs the best plan)."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "mpitrain", "plan", "gpt2.toml", "--ranks", str(ranks), "--machine", machine],
                          cwd=folder, capture_output=True, text=True, env=os.environ | ONE_THREAD)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stderr)
    return seconds, next(line for line in done.stdout.splitlines() if line.startswith("1: "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--machine", default="dgx-a100")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 1 << 21, np.uint8).tobytes())
        subprocess.run([sys.executable, "-m", "mpitrain", "data", "import", "text", "text.txt", "--out", "text"], cwd=folder,
                       check=True, capture_output=True)
        (folder / "gpt2.toml").write_text(RUN)
        for ranks in options.ranks:
            seconds, best = plan(folder, ranks, options.machine)
            print(f"{ranks:>5} ranks: {seconds:6.1f} s   {best}", flush=True)


if __name__ == "__main__":
    main()
