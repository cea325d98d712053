"""`mpitrain merge`: a run with adapters ([lora]) becomes one without: each adapter is added to its weight, in float64."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "make a run without adapters, which are added to its weights; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser, "a run with [lora]; with --adapter, the run it was trained from")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="adapters alone, of mpitrain adapter")
    parser.add_argument("--dequantize", action="store_true", help="of weights in few bits: make floats of them, to merge into")


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.errors import UsageError
    from mpitrain.train.build.adapted import plain_model, with_adapter
    from mpitrain.train.build.saved import load, save
    saved = load(options.folder, options.step, options.arguments)
    if options.adapter is not None:
        if saved.config.lora.rank:
            raise UsageError(f"{options.folder} has adapters of its own; give the run they were trained from, or no --adapter")
        saved = with_adapter(saved, options.adapter)
    elif not saved.config.lora.rank:
        raise UsageError(f"{options.folder} has no adapters to merge: its lora.rank is 0; give some with --adapter")
    made = plain_model(saved, dequantize=options.dequantize)
    save(options.out, made, {"by": "merge", "of": str(options.folder), "step": saved.step}, overwrite=options.overwrite)
    print(json.dumps({"step": saved.step, "out": str(options.out), **made.hashes()}), flush=True)
    return 0
