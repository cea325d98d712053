"""The checks of `assemble` and `inspect` before any allocation or message: refusals, counts, resolved names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitrain import nn, optim
from mpitrain.backend import select_device
from mpitrain.comm.messages.algorithms import find_own, is_own, refuse
from mpitrain.config import rules
from mpitrain.config.sections import Config
from mpitrain.config.values import check_values
from mpitrain.data import Index, Sampler
from mpitrain.errors import ConfigError
from mpitrain.nn.statistics import running_layers
from mpitrain.parallel.policies.choose import find_policy
from mpitrain.placement.place import Placement, micro_batches
from mpitrain.placement.shard_cuts import probe
from mpitrain.registry import named
from mpitrain.schedules.grid import COPIES, REPLICAS, Grid
from mpitrain.schedules.microtree import share
from mpitrain.schedules.pipeline import SCHEDULES, Schedule
from mpitrain.schedules.pipeline_check import actions_of, prove, splits_backward


@dataclass(frozen=True)
class Validated:
    """A run found valid, as far as can be told without MPI."""

    n_micro: int                             # micro-batches of a global batch
    sampler: Sampler
    algorithm: Any                           # all-reduce of gradients: a name, or the user's function
    schedule: Schedule                       # pipeline schedule
    tried: optim.Optimizer                   # the run's optimizer, made for nothing in particular
    level: Any = None                        # a `levels.plan.Planned`, where there are sites


def validate(config: Config, grid: Grid, model: nn.Module, optimizer: Callable[[Any], optim.Optimizer],
             rate: Callable[[int], Callable[[int], float]] | None, rows: Index | Sampler) -> Validated:
    """Raises for the first thing that is wrong with a run on such a grid of ranks; needs no MPI and changes nothing.

    `model` has no memory and is not cut yet, `optimizer` makes an optimizer of a storage, `rate(steps)` the learning rate as a
    function of the step (None: the optimizer's own), and `rows` are the training rows, or a federation's rounds.
    """
    t = config.train
    check_values(config)
    refuse_few_bits(config)
    refuse_untrained(model)
    on_gpu = is_on_gpu(config)
    rules.check(config, grid, on_gpu=on_gpu, more=find_policy(config).rules)
    n_micro = micro_batches(grid, config.mesh, t)
    sampler = rows if isinstance(rows, Sampler) else Sampler(rows, t.batch_size, seed=config.run.seed,
                                                             drop_last=config.data.drop_last)
    algorithm, wire = config.comm.algorithm, config.comm.wire_dtype
    if isinstance(algorithm, str) and is_own(algorithm):
        algorithm = find_own(algorithm, config.folder)
    for axes in (REPLICAS, COPIES)[:1 + (grid.size("ep") > 1)]:
        refuse(algorithm, None if wire == "float32" else wire, grid.count(axes))
    schedule = find_schedule(config)
    halves = check_schedule(config, grid, schedule, n_micro)
    tried = optimizer(probe())
    steps = t.steps or t.epochs * sampler.steps_per_epoch
    if rate is not None:
        rate(steps)
    if config.workers.count:
        from mpitrain.train.build.federation import refuse_model
        refuse_model(config, model, tried)
    if config.privacy.unit != "none":
        from mpitrain.train.build.privacy import refuse_unbounded
        refuse_unbounded(config, model, tried)
    rules.check_model(config, grid, facts_of(model, tried)._replace(
        n_micro=n_micro, fewest=sampler.size(sampler.steps_per_epoch - 1), splits_backward=halves))
    closure = tried.title if tried.needs_closure else ""
    refuse_sections(config, grid, model, tried, steps, on_gpu=on_gpu)
    level = None
    if grid.n_sites > 1 or config.sync.levels:
        from mpitrain.parallel.levels.plan import plan
        level = plan(config, grid, model, steps, sampler.steps_per_epoch, closure)
    return Validated(n_micro, sampler, algorithm, schedule, tried, level)


def is_on_gpu(config: Config) -> bool:
    """Whether the run's arrays are on a device."""
    device = config.train.device
    return select_device("auto").name == "gpu" if device == "auto" else device == "gpu"


def facts_of(model: nn.Module, tried: optim.Optimizer) -> rules.Facts:
    """What rules want to know of a model and of its optimizer, `tried` on nothing in particular, whatever the mesh."""
    mixed, modules = nn.mixtures(model), list(model.named_modules())
    return rules.Facts(
        n_micro=0, fewest=0, mixture=mixed[0][0] if mixed else "",
        synchronised=next((name for name, layer in modules if isinstance(layer, nn.SyncBatchNorm)), ""),
        scaled=next((name for name, layer in modules if isinstance(layer, nn.Embedding) and layer.max_norm is not None), ""),
        closure=tried.title if tried.needs_closure else "",
        running=next((name for name, layer in modules if running_layers(layer)), "") if tried.needs_closure else "")


def refuse_sections(config: Config, grid: Grid, model: nn.Module, tried: optim.Optimizer, steps: int, *, on_gpu: bool) -> None:
    """ConfigError for the first thing that does not go with a section, in a run of so many steps by `tried`, an optimizer made
    for nothing in particular. What few runs have is imported by them alone."""
    closure = tried.title if tried.needs_closure else ""
    if config.comm.compress_parameters:
        from mpitrain.parallel.compress.refuse import refuse_packed_parameters
        refuse_packed_parameters(config, on_gpu=on_gpu)
    if tried.sends:
        from mpitrain.train.build.one_bit import refuse_one_bit
        refuse_one_bit(config, grid, tried, steps, on_gpu=on_gpu)
    if config.comm.compress:
        from mpitrain.parallel.compress.refuse import refuse_compression
        refuse_compression(config, grid, on_gpu=on_gpu, closure=closure, steps=steps)
    if config.shrink.prune:
        from mpitrain.train.observers.pruning import refuse_pruning
        refuse_pruning(config, model, steps)
    if config.average.kind != "none":
        from mpitrain.train.observers.averaging import refuse_average
        refuse_average(config, steps)


def refuse_few_bits(config: Config) -> None:
    """ConfigError for layers that are kept in few bits: their weights are buffers, which no optimizer changes. Adapters go on
    them as they are."""
    formats = config.model.formats
    if formats and not config.lora.rank:
        path, name = next(iter(formats.items()))
        more = f" and {len(formats) - 1} more" if len(formats) > 1 else ""
        raise config.wrong(f'model.formats keeps layers in few bits, "{path}" in {name}{more}, whose weights are not trained; '
                           "train the run of floats that it was made of, with shrink.quantize to train for few bits, and then "
                           "quantize that run: mpitrain quantize RUN --format FORMAT --out RUN2; or train adapters on this one "
                           "(lora.rank)", ("model.formats",))


def refuse_untrained(model: nn.Module) -> None:
    """ConfigError if there is nothing to train."""
    parameters = model.parameters()
    if any(p.requires_grad or 0 < p.trained_from < math.inf for p in parameters if p.size):
        return
    found = f"all {len(parameters)} parameters of it are frozen" if parameters else "it has no parameters"
    raise ConfigError(f"the model, {named(model)}, has nothing to train: {found}; layers and parameters are found that are "
                      "attributes, or in a list that is one")


def refuse_parts(tried: optim.Optimizer, placement: Placement) -> None:
    """ConfigError if the optimizer needs norms of whole parameters, or sends momenta of them, and ranks have parts of them, or of
    their gradients."""
    for name, parameter in placement.stage.whole.named_parameters() if tried.whole_parameters or tried.sends else ():
        for axis in parameter.placement if tried.whole_parameters else ():
            raise ConfigError(f"{tried.title} needs norms of whole parameters, and mesh.{axis} = "
                              f'{placement.grid.size(axis)} cuts "{name}"; set optimizer.name = "adamw" or "sgd", or '
                              f"mesh.{axis} = 1")
        if tried.sends and parameter.twin_of:
            raise ConfigError(f'{tried.title} exchanges momenta, and "{parameter.twin_of}" has a gradient of which two stages '
                              'have parts; set mesh.pp = 1, untie it, or optimizer.name = "adamw"')


def refuse_cuts(config: Config, placement: Placement) -> None:
    """MeshError where a rank's part of a weight cannot be pruned as [shrink] asks for."""
    if config.shrink.prune:
        from mpitrain.train.observers.pruning import refuse_cut
        refuse_cut(config, placement.stage)


def find_schedule(config: Config) -> Schedule:
    """The pipeline schedule by name, or the user's own function, found from the configuration's folder."""
    name = config.mesh.schedule
    return SCHEDULES.resolve(name, config.folder) if isinstance(name, str) else name


def check_schedule(config: Config, grid: Grid, schedule: Schedule, n_micro: int) -> bool:
    """Proves the schedule for every number of micro-batches of a rank; returns whether it runs backward in two halves."""
    n, n_stages, chunks = grid.n_places, grid.size("pp"), config.mesh.chunks
    counts = sorted({stop - first for first, stop in (share(rank, n, n_micro) for rank in range(n))})
    for count in counts:
        prove(schedule, rules.name_of(config.mesh.schedule), n_stages=n_stages, n_micro=count, chunks=chunks)
    return splits_backward(list(actions_of(schedule, 0, n_stages, counts[-1], chunks)))
