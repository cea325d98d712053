"""Everything that only a GPU can show, in pieces of at most some minutes, beside PyTorch on the same GPU in the same run.

    make bench-gpu                              or    python benchmarks/gpu.py --json FILE [PIECE ...]
    python benchmarks/gpu.py --list             the pieces, and what each must show
    python benchmarks/gpu.py --json FILE --report TABLE       the 23 bars: figures, met or missed; nothing is measured

Each piece is a process of its own, appends its records to FILE, and is left out when FILE has them already: a run that was cut
off goes on, and one that fails costs itself alone. Times are of device events, or of many steps between two waits; sides take
turns, three rounds, medians. Inputs are drawn anew. What is computed is checked in the same run. PyTorch: fused AdamW, bfloat16
by autocast, channels_last for images, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_checks  # noqa: F401  (their pieces)
import gpu_compute  # noqa: F401
import gpu_pairs  # noqa: F401
import gpu_steps
from gpu_rows import ROWS, table
from gpu_tools import IN_RANKS, PIECES, Bench

from mpitrain.backend import select_device
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start

LIMIT_S = 590                                # of a piece


def shows(name: str) -> str:
    """The bars that a piece is needed for."""
    found = [f"{number}: {row.bar}" for number, row in ROWS.items() if name in row.pieces]
    return "; ".join(found) or "figures alone"


def printed(record: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items())


def measure(names: list[str], file: Path, began_before: float, tiny: bool) -> list[str]:
    """Runs the pieces that `file` lacks, none begun after so many seconds; the names of those that failed."""
    began, failed = time.perf_counter(), []
    for name in names:
        done = {record["piece"] for record in records_of(file)}
        if name in done or time.perf_counter() - began > began_before:
            continue
        command = [sys.executable, os.path.abspath(sys.argv[0]), "--here", name, *["--tiny"] * tiny]
        try:
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        found = [{"piece": name, **json.loads(line)} for line in out.splitlines() if line.startswith("{")]
        with file.open("a") as out_file:
            out_file.writelines(json.dumps(record) + "\n" for record in found)
        for record in found:
            print(printed(record), flush=True)
    return failed


def records_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def inside(options: argparse.Namespace) -> bool:
    """Whether this process is one of those that pieces start; then it has printed its records."""
    if not (options.here or options.ranks_of or options.first_of):
        return False
    import torch
    bench = Bench(select_device("gpu"), "cuda" if torch.cuda.is_available() or not options.tiny else "cpu", options.tiny)
    found = (PIECES[options.here](bench) if options.here else gpu_steps.first_of(bench, options.first_of) if options.first_of
             else IN_RANKS[options.ranks_of](bench, start().comm))
    for record in found:
        if not options.ranks_of or start().rank == 0:
            print(json.dumps(record), flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pieces", nargs="*", help="default: all")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--report", type=Path, help="writes the table of bars from what --json has")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0, help="no piece is begun after so many (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="problems that only try the code")
    for name in ("--here", "--ranks-of", "--first-of"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if inside(options):
        return 0
    unknown = [name for name in options.pieces if name not in PIECES]
    if options.list or unknown:
        print("\n".join(f"{name:16} {shows(name)}" for name in PIECES))
        sys.exit(f"gpu.py knows no {', '.join(unknown)}" if unknown else 0)
    failed = [] if options.report else measure(options.pieces or list(PIECES), options.json, options.seconds, options.tiny)
    lines = table(records_of(options.json))
    if options.report:
        options.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    Process().run(main)
