"""`mpitrain plan`: the best ways to run a configuration on a machine, predicted."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process

HELP = "the fastest ways to run a configuration on so many ranks of a machine, predicted; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CONFIG")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--ranks", required=True, metavar="N|A..B",
                        help="how many; for A..B the best plan at both ends and at the powers of two between them")
    parser.add_argument("--machine", required=True, help="a machine file, which bench fit --out writes of this machine, or the "
                        "name of one that is built in, such as dgx-a100")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="how many plans are shown (default: %(default)s)")
    parser.add_argument("--energy", type=Path, metavar="TABLE.csv",
                        help="a table of clocks, as slack takes one: lower clocks for the best plan whose stages it has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line for each plan, too")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.plan.planner.command import plan_lines
    for line in plan_lines(options.path, options.arguments, ranks=options.ranks, machine=options.machine, top=options.top,
                           json_file=options.json, energy=options.energy):
        print(line)
    return 0
