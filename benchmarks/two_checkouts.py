"""Step times of this checkout beside another one's, in pairs: has a change made training slower?

    python benchmarks/two_checkouts.py --other ../before [--models mlp,gpt-nano] [--ranks 2] [--pairs 9] [--json FILE]

Both sides run ``mpitrain bench train`` by the Python of their own environment (``.venv``), in turn: A B B A A B ... A side's time
is the lower quartile of its steps, which interruptions by other programs move least. A ratio above 1 says that this checkout is
slower; it is the median over pairs, with quartiles. `--start` compares a whole run of one step, from the command to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python_of(checkout: Path) -> Path:
    return checkout / ".venv" / "bin" / "python"


def environment(checkout: Path) -> dict[str, str]:
    """One thread a rank, no settings of OpenBLAS that slow some CPUs down, compiled files kept as users have them, and what Open
    MPI wants of root and few cores."""
    dropped = ("OPENBLAS_", "OMPI_", "PMIX_", "PRTE_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def command(checkout: Path, ranks: int) -> list[str]:
    mpirun = [str(python_of(checkout).with_name("mpirun")), "-n", str(ranks), "--bind-to", "core"] if ranks > 1 else []
    return [*mpirun, str(python_of(checkout)), "-P", "-m", "mpitrain"]


def step_seconds(checkout: Path, model: str, ranks: int, steps: int) -> float:
    """The lower quartile of `steps` steps of one process, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        subprocess.run([*command(checkout, ranks), "bench", "train", "--models", model, "--steps", str(steps),
                        "--json", str(answer)],
                       env=environment(checkout), check=True, capture_output=True, timeout=300)
        found = json.loads(answer.read_text().splitlines()[-1])
    return float(found["seconds_low"])


def start_seconds(checkout: Path, ranks: int) -> float:
    """Seconds of the built-in run with a single step, from the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([*command(checkout, ranks), "train", "train.steps=1", "train.epochs=0", "--quiet"], cwd=folder,
                       env=environment(checkout), check=True, capture_output=True, timeout=120)
        return time.perf_counter() - began


def in_pairs(seconds: Callable[[Any], float], one: Any, other: Any, pairs: int) -> dict[str, Any]:
    """The medians of two sides' times, and the ratio of `one` to `other` with its quartiles; `seconds(side)` measures a side."""
    times: dict[Any, list[float]] = {one: [], other: []}
    for pair in range(pairs + 1):
        for side in ((one, other), (other, one))[pair % 2]:
            found = seconds(side)
            if pair:                                         # the first pair compiles and fills caches
                times[side].append(found)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[one], times[other])], n=4)
    return {"ms": [round(1e3 * statistics.median(times[side]), 4) for side in (one, other)], "ratio": middle,
            "quartiles": [low, high]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with, which has a .venv")
    parser.add_argument("--models", default="mlp,lenet,resnet20,gpt-nano,gpt-baby")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="how many steps a side times in one process")
    parser.add_argument("--start", action="store_true", help="compare the start of a run too")
    parser.add_argument("--json", type=Path, help="write one object a line")
    given = parser.parse_args()
    other, lines = given.other.resolve(), []
    names = [*given.models.split(","), *(["start"] if given.start else [])]
    for name in names:
        def seconds(side: Path, name: str = name) -> float:
            return start_seconds(side, given.ranks) if name == "start" else step_seconds(side, name, given.ranks, given.steps)
        found = in_pairs(seconds, ROOT, other, given.pairs)
        lines.append({"what": name, "ranks": given.ranks, **found})
        (here, there), (low, high) = found["ms"], found["quartiles"]
        print(f"{name:10} {given.ranks} rank(s)  here {here:9.2f} ms  other {there:9.2f} ms  "
              f"ratio {found['ratio']:.3f} ({low:.3f} .. {high:.3f})", flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
