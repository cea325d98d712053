"""`mpitrain adapter`: the adapters of a run ([lora]) alone, with the hash of the parameters that they belong to."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "write the adapters of a run alone, a small part of its checkpoint; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run with [lora]")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="an empty folder, or a new one")
    verbs.add_step(parser)


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.errors import UsageError
    from mpitrain.train.build.adapted import write
    from mpitrain.train.build.saved import load
    saved = load(options.folder, options.step)
    if not saved.config.lora.rank:
        raise UsageError(f"{options.folder} has no adapters: its lora.rank is 0")
    print(json.dumps({"step": saved.step, "out": str(options.out), **write(options.out, saved)}), flush=True)
    return 0
