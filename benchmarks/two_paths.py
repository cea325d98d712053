"""Step times with kernels as loops of Numba (or plain NumPy) beside those in C, in pairs: what does a missing C compiler cost?

    python benchmarks/two_paths.py [--kernels numba] [--models mlp,resnet20,gpt-nano,lstm] [--pairs 5] [--json FILE]

Each side is a process of its own with MPITRAIN_KERNELS set, in turn: A B B A A B ... One thread. A side's time is the lower
quartile of its steps; the ratio is the median over pairs, with quartiles. The LSTM has 2 layers of 128, length 100, batch 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from two_checkouts import ROOT, environment, in_pairs, python_of

from mpitrain import nn
from mpitrain.bench.workloads import WORKLOADS, Workload


class Words(nn.Module):
    """The next word of each, by an LSTM."""

    def __init__(self, vocabulary: int = 65, width: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, 2)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x: Any) -> Any:
        return self.output(self.recurrent(self.embedding(x))[0])


def step_seconds(model: str, steps: int) -> float:
    """The lower quartile, in this process."""
    from mpi4py import MPI

    from mpitrain.backend import keep_freed_memory
    from mpitrain.bench.train import WARM_UP, Training
    from mpitrain.train.machine.threads import pin
    pin(1)
    keep_freed_memory()
    training = Training(Workload(Words, 64, (100,), 65, 1, tokens=True) if model == "lstm" else WORKLOADS[model], MPI.COMM_WORLD)
    training.run(WARM_UP)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    training.close()
    return statistics.quantiles(times, n=4)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=["numba", "numpy"], default="numba")
    parser.add_argument("--models", default="mlp,resnet20,gpt-nano,lstm")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="how many steps a side times in one process")
    parser.add_argument("--json", type=Path, help="write one object a line")
    parser.add_argument("--alone", help="print the seconds of a step of this model in this process, and end")
    given = parser.parse_args()
    if given.alone:
        print(step_seconds(given.alone, given.steps))
        return 0
    lines = []
    for model in given.models.split(","):
        def seconds(kernels: str, model: str = model) -> float:
            done = subprocess.run([str(python_of(ROOT)), __file__, "--alone", model, "--steps", str(given.steps)], text=True,
                                  env=environment(ROOT) | {"MPITRAIN_KERNELS": kernels}, check=True, stdout=subprocess.PIPE,
                                  timeout=300)
            return float(done.stdout.splitlines()[-1])
        found = in_pairs(seconds, given.kernels, "c", given.pairs)
        lines.append({"what": model, "kernels": given.kernels, **found})
        (here, there), (low, high) = found["ms"], found["quartiles"]
        print(f"{model:10} {given.kernels} {here:9.2f} ms  c {there:9.2f} ms  "
              f"ratio {found['ratio']:.3f} ({low:.3f} .. {high:.3f})", flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
