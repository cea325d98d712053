"""`mpitrain factor`: a run whose linear layers are products of two smaller ones, made from a trained one."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "make a run whose linear layers are two smaller ones each from a trained one; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    parser.add_argument("--layers", nargs="+", required=True, metavar="PATTERN", help="linear layers, names with *")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--rank", type=int, help="the rank of each")
    how.add_argument("--energy", type=float, help="the share of the sum of squared singular values that each keeps, below 1")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.errors import UsageError
    from mpitrain.shrink.factor import choose, factor
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load, save
    if options.rank is not None and options.rank < 1:
        raise UsageError(f"--rank must be at least 1, found {options.rank}")
    if options.energy is not None and not 0 < options.energy < 1:
        raise UsageError(f"--energy must lie in (0, 1), found {options.energy}")
    saved = load(options.folder, options.step, options.arguments)
    ranks = choose(saved.model, options.layers, options.rank, options.energy)
    if not ranks:
        raise UsageError("no layer of these has fewer numbers in two factors; give a smaller --rank or --energy")
    made = saved.made_into(saved.model, model={"ranks": {**saved.config.model.ranks, **ranks}})
    model = make_model(made.config)
    model.initialize(saved.config.run.seed, saved.config.train.precision)
    errors = factor(saved.model, model)
    before, after = saved.model.count_parameters(), model.count_parameters()
    made = made.made_into(model.eval().requires_grad_(False))
    layers = [{"layer": path, "rank": rank, "error": errors[path]} for path, rank in ranks.items()]
    save(options.out, made, {"by": "factor", "of": str(options.folder), "step": saved.step, "layers": layers},
         overwrite=options.overwrite)
    print(json.dumps({"step": saved.step, "out": str(options.out), "parameters": [before, after], "layers": layers}), flush=True)
    return 0
