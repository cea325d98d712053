"""`mpitrain inspect`: the content of a run, a configuration, a data file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process

HELP = "what is in a run, a configuration, a data file; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--ranks", type=int, help="draw the placement of a configuration for so many ranks (default: 1)")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.plan.inspect import inspect
    for line in inspect(options.path, options.arguments, ranks=options.ranks):
        print(line)
    return 0
