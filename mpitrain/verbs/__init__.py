"""The verbs of the command line, a file each: `HELP`, `add_arguments(parser)`, and `run(options, process)`, its exit status.

A verb imports its dependencies when it runs: all verbs are imported for each command.
"""

from argparse import ArgumentParser
from typing import NoReturn

from mpitrain.errors import UsageError


class Parser(ArgumentParser):
    """A parser whose errors are ours, one line each."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")
