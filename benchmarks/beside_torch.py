"""What benchmarks beside PyTorch on one thread have in common: their command line, and what both sides are set to."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.comm.job.guard import symmetric


def settle(about: str | None, choices: Mapping[str, Iterable[str]], counts: Mapping[str, int],
           *switches: str) -> argparse.Namespace:
    """The options of such a program, whose docstring is `about`, once both sides are ready.

    ``--CHOICE`` takes some of its names with commas between (default: all) and becomes their list; ``--COUNT`` is a number of
    at least 1; a switch is a flag without value; ``--json`` takes a file. UsageError for what is none of these.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    for name, known in choices.items():
        parser.add_argument(f"--{name}", default=",".join(known))
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json", type=Path, help="write a line for each result to this file")
    options = parser.parse_args()
    with symmetric():
        for name, known in choices.items():
            setattr(options, name, arguments.names(getattr(options, name), known, f"--{name}"))
        for name in counts:
            arguments.at_least(getattr(options, name), 1, f"--{name}")
    keep_freed_memory()                                       # as `mpitrain train` does; it serves PyTorch's malloc too
    torch.set_num_threads(1)
    return options
