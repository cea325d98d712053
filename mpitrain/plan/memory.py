"""The memory of a rank by purpose, predicted before a run from shapes and a few rows.

    parameters    of this rank's stage, or its slices of them
    gradients     their sums: as many as exist at once while micro-batches are added up, or slices
    optimizer     its state; `offloaded` if that lies elsewhere; of a federation also all that workers have beside the parameters
    copies        of the parameters, or of slices of them, beside those: the mean of [average], the weights of shrink.rewind
    residuals     of compressed gradients
    levels        start values and outer states of sites, and what travels between them
    activations   the peak of a step's arrays on top of those that stay: saved for backward, and temporary
    pool          all memory that arrays have taken from the system: all of those, rows read ahead, buckets in flight, unsharded
                  blocks, and free blocks kept for the next arrays

Of a run on a GPU it is the memory of the device, and activations are tried there, in the formats they have; where there is no GPU
to try them on, on the host, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import CPU, Device, select_device
from mpitrain.backend.memory import pool_in_use
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MpitrainError, name_and_text, place
from mpitrain.nn import FlatLayout
from mpitrain.optim import Optimizer
from mpitrain.placement.bytes import Forecast, Use, predicted, sums_at_once
from mpitrain.placement.place import Placement
from mpitrain.placement.shard_cuts import largest_neighbours, probe
from mpitrain.plan.activations import Course, most, trace
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_check import actions_of, splits_backward
from mpitrain.train.build.from_config import make_loss, make_optimizer
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.validate import find_schedule

Tracing: TypeAlias = "Callable[..., list[Course]]"
AHEAD = 3                                    # batches of a rank: one at work, two read ahead
SLOTS = 2                                    # batches on a device: one at work, one on its way
NOBODY = "their bytes are counted by the pool of arrays, which needs a C compiler"
BETWEEN = 8                                  # free blocks that fit no array take 1/BETWEEN of the activations on top


def forecast(p: Placement, sample: tuple[Any, Any], *, loss: Any, optimizer: Any, tokens: bool, schedule: Schedule,
             offload: str = "none", copies: int = 0, of_workers: int = 0, residuals: Callable[[Placement], int] = lambda p: 0,
             levels: Callable[[Placement], int] = lambda p: 0, tracing: Tracing = trace) -> Forecast:
    """The forecast of a run of `p`, whose model is used up here, on the first rank of each stage. Needs no MPI.

    `sample` is a host row (x, y); `optimizer(storage)` makes one, whose state `offload` may keep elsewhere.
    `copies` is how many of the weights are kept, `of_workers` how many arrays of their size a federation's workers have,
    `residuals(placement)` the bytes of what compressed gradients leave out, and `levels(placement)` those that sites keep to
    meet others. `tracing` stands for `activations.trace`, where its passes are known already.
    """
    if p.grid.shares_layers:
        from mpitrain.parallel.layers.join import alone
        from mpitrain.parallel.layers.tensor_loss import cut_loss
        loss = cut_loss(loss, p.head, alone(p))
    stages = [p.at_stage(index) for index in range(p.stage.n_stages)]
    layouts = [stage.layout() for stage in stages]
    tried = optimizer(probe())
    kept = [_kept(stage, layout, tried, offload, copies, of_workers)._replace(residuals=residuals(stage), levels=levels(stage))
            for stage, layout in zip(stages, layouts)]
    others = [_on_their_way(stage, layout) for stage, layout in zip(stages, layouts)]
    if p.part is not None:
        sample = p.part(sample[0]), p.part(sample[1])
    needed, why = None, NOBODY
    try:
        needed = _activations(stages, schedule, sample, loss=loss, tokens=tokens, tracing=tracing)
    except Exception as error:                # a model that a few rows do not suit may raise, too: the report goes without
        why = error.message if isinstance(error, MpitrainError) else name_and_text(error, place(error))
    if needed is None:
        return Forecast(kept, why)
    peaks, kept_for_a_row, cached = needed
    rows = sum(array.nbytes for array in sample) * _rows(p)
    cached += (AHEAD if p.train.device == "cpu" else SLOTS) * p.rounds * rows + _graphs(p) * rows
    return Forecast([_whole(use, activations, other + cached) for use, activations, other in zip(kept, peaks, others)],
                    kept_for_a_row=kept_for_a_row)


def forecast_of(config: Config, placed: Placement, inputs: Inputs, *, share: float = 1.0, masters: bool = True,
                **more: Any) -> Forecast:
    """The memory of a run of `placed` by its configuration; the first training row is the sample. A rank has that `share` of a
    worker that compresses gradients, and with `masters`, slices of float32 apart from parameters that are rounded. `more` is
    handed to `forecast`."""
    sends = make_optimizer(config, probe()).sends
    if config.comm.compress or sends:
        from mpitrain.plan.compression import residual_bytes
        more["residuals"] = partial(residual_bytes, config, share=share, text="onebit" if sends else "")
    if config.sync.levels:
        from mpitrain.plan.levels import level_bytes
        more["levels"] = partial(level_bytes, config)
    copies = (config.average.kind != "none") + bool(config.shrink.prune and config.shrink.rewind != "never")
    copies += bool(config.comm.compress_parameters and masters and placed.kind in ("optimizer", "gradients"))
    return forecast(placed, inputs.sample(), loss=make_loss(config, inputs.tokens, inputs), tokens=inputs.tokens,
                    optimizer=lambda storage: make_optimizer(config, storage), schedule=find_schedule(config),
                    offload=config.optimizer.offload, copies=copies, of_workers=of_workers(config, placed), **more)


def of_workers(config: Config, placed: Placement) -> int:
    """How many arrays of the parameters' size workers on a rank, and the outer rule, have."""
    if not config.workers.count:
        return 0
    from mpitrain.train.build.federation import arrays_of  # few runs are federations
    return arrays_of(config, placed.grid.n_places)


def _whole(use: Use, activations: int, others: int) -> Use:
    stays = use.parameters + use.gradients + use.optimizer + use.copies + use.residuals + use.levels
    pool = stays + activations + activations // BETWEEN + others
    return use._replace(activations=activations, pool=pool)


def _rows(p: Placement) -> int:
    """The rows of the largest micro-batch."""
    return -(-p.train.batch_size // p.n_micro)


def _kept(p: Placement, layout: FlatLayout, optimizer: Optimizer, offload: str, copies: int, of_workers: int) -> Use:
    """The memory that stays from step to step, by formula."""
    kind = _cut_states(p)
    parameters, gradients, state = p.bytes(layout, kind, optimizer)
    state += of_workers * parameters
    if kind in ("none", "optimizer"):
        gradients *= sums_at_once(p.n_micro, p.grid.n_places, tree=p.tree is not None)
    kept = copies * predicted(layout.size, kind, p.grid.count(REPLICAS), itemsize=layout.dtype.itemsize,
                              state=layout.size).optimizer
    if offload == "none":
        return Use(parameters, gradients, state, 0, None, None, kept)
    on_host = 2 * parameters if p.train.device == "gpu" else 0            # copies of parameters and gradients
    return Use(parameters, gradients, 0, state + on_host, None, None, kept)


def _cut_states(p: Placement) -> str:
    """The kind of states that `comm.sharding` cuts; one copy per node counts as if one node, whose copy has slices, were all."""
    return {"optimizer": "none", "parameters": "gradients"}.get(p.kind, p.kind) if p.comm.node_shared else p.kind


def _graphs(p: Placement) -> int:
    """How many graphs a run on a device captures, if it does (`train.build.graphs`): one for each arena of gradients. Each has a
    micro-batch of its own that it reads; what it computes takes the memory that the step before it had."""
    if p.train.device == "cpu" or p.train.graph == "off" or p.train.recompute or _cut_states(p) in ("gradients", "parameters") \
            or p.stage.n_stages * len(p.stage.chunks) > 1:
        return 0
    return sums_at_once(p.n_micro, p.grid.n_places, tree=p.tree is not None)


def _on_their_way(p: Placement, layout: FlatLayout) -> int:
    """Bytes of buckets in flight, of the others' messages for them, and of unsharded blocks, if states are cut."""
    kind, replicas = _cut_states(p), p.grid.count(REPLICAS)
    if kind not in ("gradients", "parameters"):
        return 0
    from mpitrain.parallel.policies.bucket_memory import ring_size
    from mpitrain.parallel.policies.sharded_reducer import IN_FLIGHT, SHARED_AT_ONCE
    sizes = [b.stop - b.start for b in p.buckets(layout)]
    if p.comm.node_shared:                                    # nothing is received
        return layout.dtype.itemsize * ring_size(sizes, SHARED_AT_ONCE)
    largest = sum(sorted(sizes, reverse=True)[:IN_FLIGHT + 1])
    received = largest * (replicas - 1) // replicas
    return layout.dtype.itemsize * (largest + received + (largest_neighbours(p.stage) if kind == "parameters" else 0))


def _activations(stages: Sequence[Placement], schedule: Schedule, sample: tuple[Any, Any], *, loss: Any, tokens: bool,
                 tracing: Tracing) -> tuple[list[int], int, int] | None:
    """The activations of each stage, what a row keeps on all of them, and what the first use of a device leaves there for ever,
    such as workspaces; None if no pool counts arrays."""
    device = _device(stages[0].train.device)
    pool, counting = _counter(device)
    if pool is None:
        return None
    first, n_stages, chunks = stages[0], len(stages), len(stages[0].stage.chunks)
    programs = [list(actions_of(schedule, index, n_stages, first.rounds, chunks)) for index in range(n_stages)]
    parts = [stages[v % n_stages].stage.chunks[v // n_stages] for v in range(n_stages * chunks)]
    before = pool.usage().used
    with counting:
        courses = tracing(parts, loss, *sample, _rows(first), pool=pool, seed=0, precision=first.train.precision, tokens=tokens,
                        split=any(map(splits_backward, programs)), device=device)
    cached = 0 if device.xp is np else max(0, pool.usage().used - before)
    kept = sum(course.phases["F"].kept for course in courses)
    return [most(program, p.stage.virtual, courses) for p, program in zip(stages, programs)], kept // _rows(first), cached


def _counter(device: Device) -> tuple[Any, AbstractContextManager[Any]]:
    """(who counts the arrays of the device, None where nobody does; the context in which it does)."""
    if device.xp is np:
        return pool_in_use(), nullcontext()
    from mpitrain.backend.device_memory import DevicePool  # a run on the host needs none
    pool = DevicePool(device)
    return pool, pool


def _device(name: str) -> Device:
    """Where activations are tried: on the run's device, or, where there is none here, on the host."""
    try:
        return select_device(name)
    except ConfigError:
        return CPU
