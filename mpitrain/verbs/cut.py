"""`mpitrain cut`: a run with fewer channels, or of one path of a supernet, made from a trained one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from mpitrain import verbs
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.config import Config
    from mpitrain.nn import Module
    from mpitrain.shrink.cut import Chosen
    from mpitrain.train.build.saved import SavedModel

HELP = "make a run with fewer channels, or of one path of a supernet, from a trained one"
IMPORTANCE = ("l2", "taylor")


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--work", type=float, help="the share of multiply-adds that may be left: 0.5; needs no MPI")
    what.add_argument("--path", help='a path of a supernet: "smallest", or "stage1.depth=2, stage1_block0.width=16"')
    parser.add_argument("--importance", choices=IMPORTANCE, default="l2",
                        help="of channels: the L2 norm of their weights, or how much the loss depends on them (default: l2)")
    verbs.add_calibrate(parser, "that show how much, for taylor")


def run(options: Namespace, process: Process) -> int:
    if options.path is not None:
        return _path(options, process)
    count = verbs.calibrate_rows(options, options.importance == "taylor", f"--importance {options.importance}")
    if options.importance != "taylor" and not verbs.is_first():
        return 0
    from mpitrain.shrink.cut import choose
    from mpitrain.shrink.importance import norms
    from mpitrain.shrink.tracing import trace
    from mpitrain.train.build.saved import load
    saved, first = load(options.folder, options.step, options.arguments), True
    _refuse_made(saved)
    verbs.refuse_supernet(saved, "cut")
    rows = verbs.first_rows(saved, 2)
    graph = trace(saved.model, rows)
    importance = norms(saved.model)
    if options.importance == "taylor":
        from mpitrain.run.saved_run import SavedRun, with_whole_models
        with SavedRun.of_job(with_whole_models(saved.config), process) as started:
            importance, first = started.sensitivities(saved, graph, count), started.comm.rank == 0
    if first:
        write(options, saved, choose(saved.model, graph, importance, options.work), rows)
    return 0


def _path(options: Namespace, process: Process) -> int:
    """Cuts a path out of a supernet, whose statistics all ranks measure."""
    from mpitrain.comm.job import guard
    from mpitrain.run.saved_run import SavedRun, with_whole_models
    from mpitrain.train.build.saved import load, save
    with guard.symmetric():
        for given in ("importance", "calibrate"):
            if getattr(options, given) not in (None, IMPORTANCE[0]):
                raise UsageError(f"--{given} is for --work, which chooses channels; a path says what stays: leave it out")
        saved = load(options.folder, options.step, options.arguments)
        verbs.refuse_made(saved, "cut")
    with SavedRun.of_job(with_whole_models(saved.config), process) as started:
        with started.paths(options.folder, options.step) as paths:
            with guard.symmetric():
                path = paths.elastic.read(options.path)
            smaller, text = paths.cut(path), paths.elastic.write(path)
        if started.comm.rank == 0:
            model = {"arguments": {**saved.config.model.arguments, "path": text}}
            made = {"by": "cut", "of": str(options.folder), "step": saved.step, "path": text}
            out = save(options.out, saved.made_into(smaller, model=model), made, overwrite=options.overwrite)
            share = smaller.count_parameters() / saved.model.count_parameters()
            print(f"model.path = {text}\n{out}: {share:.3f} of the parameters are left; go on with: mpitrain train "
                  f"{out / 'config.toml'} model.init_from={out.resolve()} run.out=...", flush=True)
    return 0


def _refuse_made(saved: SavedModel) -> None:
    """UsageError for a run that is factored: its layers go with the sizes that they were made for."""
    verbs.refuse_made(saved, "cut")
    if saved.config.model.ranks:
        raise UsageError("the run is factored (model.ranks), and its channels cannot be cut; cut the run it was made of, and "
                         "factor what is left")


def _refuse_mesh(model: Module, config: Config) -> None:
    """MeshError where the run's own mesh.tp does not divide the new sizes; mesh.tp may be given with the verb."""
    if config.mesh.tp > 1:
        from mpitrain.placement.tensor_plan import narrow, read_plan
        narrow(read_plan(model, config.mesh.plan or model.plan), 0, config.mesh.tp)


def write(options: Namespace, saved: SavedModel, chosen: Chosen, rows: Any) -> None:
    """The cut run, and what was done."""
    from mpitrain.config import changed
    from mpitrain.shrink.cut import transfer
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import save
    model = saved.config.model
    keys = {"arguments": {**model.arguments, **chosen.sizes}, "shapes": {**model.shapes, **chosen.shapes}}
    config = changed(saved.config, model=keys)
    _refuse_mesh(make_model(config), config)
    smaller = make_model(config)
    smaller.initialize(config.run.seed, config.train.precision)
    transfer(saved.model, smaller, chosen, rows)
    made = {"by": "cut", "of": str(options.folder), "step": saved.step, "importance": options.importance, "work": chosen.work,
            "left": list(chosen.left)}
    out = save(options.out, saved.made_into(smaller.requires_grad_(False), model=keys), made, overwrite=options.overwrite)
    for line in chosen.left:
        print(line)
    for key, sizes in chosen.before.items():
        print(f"model.{key} = {chosen.sizes[key]}, was {sizes}")
    for name, shape in chosen.shapes.items():
        print(f"{name}: {shape}, was {list(saved.model.state_dict()[name].shape)}")
    share = smaller.count_parameters() / saved.model.count_parameters()
    print(f"{out}: {chosen.work:.3f} of the work and {share:.3f} of the parameters are left; go on with: "
          f"mpitrain train {out / 'config.toml'} model.init_from={out.resolve()} run.out=...")
