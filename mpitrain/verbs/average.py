"""`mpitrain average`: a run whose weights are the mean that another run has kept ([average])."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from functools import partial

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "make a run of the averaged weights of another ([average]), with batch-norm statistics of their own; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser, "a run with [average]")
    parser.add_argument("--rows", type=verbs.rows, metavar="ROWS",
                        help="training rows that batch-norm statistics are computed of (default: all)")


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.plan.prepare import open_data
    from mpitrain.train.build.averaged import averaged
    from mpitrain.train.build.saved import load, save
    saved = load(options.folder, options.step, options.arguments)
    made = averaged(saved, partial(open_data, saved.config), options.rows)
    save(options.out, made, {"by": "average", "of": str(options.folder), "step": made.step}, overwrite=options.overwrite)
    print(json.dumps({"step": made.step, "out": str(options.out), **made.hashes()}), flush=True)
    return 0
