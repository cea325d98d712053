"""`mpitrain cut`: a run with fewer channels, made from a trained one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "make a run with fewer channels from a trained one; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    parser.add_argument("--work", type=float, required=True, help="the share of multiply-adds that may be left: 0.5")


def run(options: Namespace, process: Process) -> int:
    import numpy as np

    from mpitrain.config import changed
    from mpitrain.data.loader import SampleReader
    from mpitrain.plan.inspect import open_data
    from mpitrain.shrink.cut import choose, transfer
    from mpitrain.shrink.tracing import trace
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load, save
    saved = load(options.folder, options.step, options.arguments)
    inputs, model = open_data(saved.config), saved.model
    x, _ = SampleReader(inputs.training, saved.transforms).read(np.asarray(inputs.train_rows[:2], np.int64))
    rows = x if inputs.tokens else np.asarray(x, next(iter(model.parameters())).dtype)
    graph = trace(model, rows)
    chosen = choose(model, graph, options.work)
    arguments = {"arguments": {**saved.config.model.arguments, **chosen.sizes}}
    smaller = make_model(changed(saved.config, model=arguments))
    smaller.initialize(saved.config.run.seed, saved.config.train.precision)
    transfer(model, smaller, chosen, rows)
    made = {"by": "cut", "of": str(options.folder), "step": saved.step, "work": chosen.work, "left": list(chosen.left)}
    out = save(options.out, saved.made_into(smaller.requires_grad_(False), model=arguments), made, overwrite=options.overwrite)
    for line in chosen.left:
        print(line)
    for key, sizes in chosen.sizes.items():
        print(f"model.{key} = {sizes}, was {chosen.before[key]}")
    share = smaller.count_parameters() / model.count_parameters()
    print(f"{out}: {chosen.work:.3f} of the work and {share:.3f} of the parameters are left; go on with: "
          f"mpitrain train {out / 'config.toml'} model.init_from={out.resolve()} run.out=...")
    return 0
