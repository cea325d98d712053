"""`mpitrain merge`: a run with adapters ([lora]) becomes one without: each adapter is added to its weight, in float64."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process
from mpitrain.verbs import add_step

HELP = "a run folder without adapters, which are added to its weights"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run with [lora]")
    parser.add_argument("--out", type=Path, required=True, help="the new run folder")
    add_step(parser)
    parser.add_argument("--overwrite", action="store_true", help="write over a folder that has files in it")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.errors import UsageError
    from mpitrain.shrink.lora import merge
    from mpitrain.train.build.adapters import without
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load, save
    saved = load(options.folder, options.step)
    if not saved.config.lora.rank:
        raise UsageError(f"{options.folder} has no adapters to merge: its lora.rank is 0")
    made = saved.made_into(saved.model, **without(saved.config))
    plain = make_model(made.config)
    plain.initialize(saved.config.run.seed, saved.config.train.precision)
    merge(saved.model, plain)
    made = made.made_into(plain.eval().requires_grad_(False))
    save(options.out, made, {"by": "merge", "of": str(options.folder), "step": saved.step}, overwrite=options.overwrite)
    print(json.dumps({"step": saved.step, "out": str(options.out), **made.hashes()}), flush=True)
    return 0
