"""The verbs of the command line, a file each: `HELP`, `add_arguments(parser)`, and `run(options, process)`, its exit status.

A verb imports its dependencies when it runs: all verbs are imported for each command.
"""

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import NoReturn

from mpitrain.errors import UsageError


class Parser(ArgumentParser):
    """A parser whose errors are ours, one line each."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")


def add_made(parser: ArgumentParser, of: str = "a run folder") -> None:
    """The arguments of a verb that makes a run of a run: `options.folder`, `arguments`, `step`, `out` and `overwrite`."""
    parser.add_argument("folder", type=Path, metavar="RUN", help=of)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN2", help="the folder of the new run")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in RUN2")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")
    add_step(parser)


def add_step(parser: ArgumentParser) -> None:
    """``--step N`` and ``--best``, which choose a checkpoint: `options.step` is a number, "best", or None for the newest."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=_step, metavar="N", help="the checkpoint of this step (default: the newest)")
    which.add_argument("--best", dest="step", action="store_const", const="best",
                       help="the checkpoint with the lowest validation loss")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"expected the number of a step, found {text!r}")
    return int(text)
