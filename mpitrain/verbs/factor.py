"""`mpitrain factor`: a run whose layers are products of two smaller ones, made from a trained one."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from mpitrain import verbs
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.train.build.saved import SavedModel

HELP = "make a run whose layers are two smaller ones each from a trained one; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    parser.add_argument("--layers", nargs="+", required=True, metavar="PATTERN", help="linear layers, convolutions, names with *")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--rank", type=int, help="the rank of each")
    how.add_argument("--energy", type=float, help="the share of the sum of squared singular values that each keeps, below 1")
    how.add_argument("--work", type=float, help="the share of the model's multiply-adds that may be left: 0.5")


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.shrink.factor import factor
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load, save
    if options.rank is not None and options.rank < 1:
        raise UsageError(f"--rank must be at least 1, found {options.rank}")
    for flag in ("energy", "work"):
        if (value := getattr(options, flag)) is not None and not 0 < value < 1:
            raise UsageError(f"--{flag} must lie in (0, 1), found {value}")
    saved = load(options.folder, options.step, options.arguments)
    verbs.refuse_made(saved, "factored")
    verbs.refuse_supernet(saved, "factored")
    ranks, about = _ranks(options, saved)
    if not ranks:
        raise UsageError("no layer of these has fewer numbers in two factors; give a smaller --rank or --energy"
                         + "".join(f"; {why}" for why in about["left"]))
    made = saved.made_into(saved.model, model={"ranks": {**saved.config.model.ranks, **ranks}})
    model = make_model(made.config)
    model.initialize(saved.config.run.seed, saved.config.train.precision)
    errors = factor(saved.model, model)
    before, after = saved.model.count_parameters(), model.count_parameters()
    made = made.made_into(model.eval().requires_grad_(False))
    about |= {"layers": [{"layer": path, "rank": rank, "error": errors[path]} for path, rank in ranks.items()]}
    save(options.out, made, {"by": "factor", "of": str(options.folder), "step": saved.step, **about}, overwrite=options.overwrite)
    print(json.dumps({"step": saved.step, "out": str(options.out), "parameters": [before, after], **about}), flush=True)
    return 0


def _ranks(options: Namespace, saved: SavedModel) -> tuple[dict[str, int], dict[str, Any]]:
    """The rank of each layer, and what is told of the choice."""
    from mpitrain.shrink.factor import candidates, of_energy, of_rank, of_work
    layers, left = candidates(saved.model, options.layers)
    if options.rank is not None:
        return of_rank(layers, options.rank), {"left": left}
    if options.energy is not None:
        return of_energy(layers, options.energy), {"left": left}
    from mpitrain.shrink.tracing import trace
    graph = trace(saved.model, verbs.first_rows(saved, 2))
    ranks, work = of_work(layers, graph.products, options.work)
    return ranks, {"left": [*left, *graph.uncounted], "work": work}
