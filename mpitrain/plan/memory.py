"""What the memory of a rank is for: predicted before a run, from shapes and a few rows, and measured in it.

    parameters    of this rank's stage, or its slices of them
    gradients     their sums: as many as there are at once while micro-batches are added up, or slices
    optimizer     its state; `offloaded` where that lies elsewhere
    activations   the most that steps have of arrays beyond what stays: what backward needs, and what is used meanwhile
    pool          all that arrays have taken from the system: all those, rows read ahead, buckets on their way, blocks that are
                  put together, and what is free and kept for the next ones
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpitrain import nn
from mpitrain.backend.memory import pool_in_use
from mpitrain.config import Config
from mpitrain.errors import MpitrainError, name_and_text, place
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.layers.context_parallel import ContextParallel
from mpitrain.parallel.layers.expert_parallel import ExpertParallel
from mpitrain.parallel.layers.tensor_parallel import TensorParallel
from mpitrain.parallel.policies.gathered import blocks_of
from mpitrain.parallel.policies.sharded import predicted, probe, where_to_cut
from mpitrain.parallel.policies.sharded_reducer import IN_FLIGHT, SHARED_AT_ONCE, ShardedReducer
from mpitrain.parallel.policies.shared_buckets import ring_size
from mpitrain.placement.buckets import plan_buckets
from mpitrain.placement.stages import Stage, cut
from mpitrain.plan.activations import Course, LoneMesh, most, trace
from mpitrain.plan.table import table
from mpitrain.schedules.microtree import Counter, joins, nodes_of, share, width
from mpitrain.schedules.pipeline_check import actions_of, splits_backward
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.from_config import describe
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.validate import count_micro_batches, find_schedule

AHEAD = 3                                    # batches of a rank: one at work, two read ahead
NOBODY = "their bytes are counted by the pool of arrays, which needs a C compiler"
BETWEEN = 8                                  # such a part of activations more is free between them, where nothing fits


class Use(NamedTuple):
    """Bytes of one rank; None where nobody can tell."""

    parameters: int
    gradients: int
    optimizer: int
    offloaded: int
    activations: int | None
    pool: int | None


@dataclass(frozen=True)
class Forecast:
    """The use of a rank of each stage, and `why` something of it cannot be told."""

    stages: list[Use]
    why: str = ""


class Sizes(NamedTuple):
    """Of a mesh."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def places(self) -> int:
        """How many have samples of their own."""
        return self.dp * self.ep

    @property
    def replicas(self) -> int:
        """How many add up gradients, and cut states."""
        return self.dp * self.ep * self.cp


def forecast(model: nn.Module, config: Config, sizes: Sizes, sample: tuple[Any, Any] | None, *, loss: Any, optimizer: Any,
             tokens: bool, counts: Sequence[int] = (), why: str = "") -> Forecast:
    """What `assemble` of `model`, which has no memory and is used up here, would take on such a mesh. Needs no MPI.

    `sample` is a host row (x, y), None where there are no data, as `why` says; `counts` are the virtual stages' numbers of
    blocks.
    """
    n_micro = count_micro_batches(config.train.micro_batches, config.train.batch_size, sizes.pp, sizes.places, config.mesh.chunks)
    by_layout = config.train.reproducible == "layout"
    if (sizes.pp > 1 or by_layout) and isinstance(model, nn.Sequential):
        model.untie()
    seen, loss = _cut_layers(model, config, sizes, sample, loss)
    stages = [cut(model, index, sizes.pp, config.mesh.chunks, counts=counts) for index in range(sizes.pp)]
    kept = [_kept(stage, config, sizes, n_micro, optimizer) for stage in stages]
    others = [_on_their_way(stage, config, sizes) for stage in stages]
    needed: list[int] | None = None
    try:
        needed = _activations(stages, config, n_micro, sizes.places, seen, loss=loss, tokens=tokens) if seen is not None else None
    except Exception as error:                # of a model that a few rows do not suit, too: the report goes without
        why = error.message if isinstance(error, MpitrainError) else name_and_text(error, place(error))
    if needed is None:
        return Forecast(kept, why or NOBODY)
    rows = sum(array.nbytes for array in sample or ()) * -(-n_micro // sizes.places) * _rows(config, n_micro)
    return Forecast([_whole(use, activations, other + AHEAD * rows) for use, activations, other in zip(kept, needed, others)])


def _cut_layers(model: nn.Module, config: Config, sizes: Sizes, sample: tuple[Any, Any] | None,
                loss: Any) -> tuple[tuple[Any, Any] | None, Any]:
    """(what a rank has of a sample, the loss of its outputs); the model is cut as `parallel.connect.hold` cuts it."""
    lone: Any = LoneMesh(sizes._asdict())
    m = config.mesh
    tensor = TensorParallel(model, lone, m.plan, sequence=m.sequence, shared=False) if sizes.tp > 1 else None
    if sizes.ep > 1:
        ExpertParallel(model, lone)
    if sizes.cp > 1:
        context = ContextParallel(model, lone, tensor.along if tensor else ())
        sample = None if sample is None else (context.part(sample[0]), context.part(sample[1]))
    return sample, loss if tensor is None else tensor.loss(loss)


def forecast_of(config: Config, sizes: Sizes, inputs: Inputs | None, why: str = "", *, counts: Sequence[int] = ()) -> Forecast:
    """The same for a configuration, whose first training row is looked at."""
    tokens = inputs is not None and inputs.tokens
    described = describe(config, tokens)
    return forecast(described.model, config, sizes, None if inputs is None else inputs.sample(), loss=described.loss,
                    optimizer=described.optimizer, tokens=tokens, counts=counts or stage_counts(config), why=why)


def stage_counts(config: Config) -> tuple[int, ...]:
    """Each virtual stage's number of blocks, as far as the configuration says."""
    return config.mesh.stages if isinstance(config.mesh.stages, tuple) else ()


def _whole(use: Use, activations: int, others: int) -> Use:
    pool = use.parameters + use.gradients + use.optimizer + activations + activations // BETWEEN + others
    return use._replace(activations=activations, pool=pool)


def _rows(config: Config, n_micro: int) -> int:
    """Of the largest micro-batch."""
    return -(-config.train.batch_size // n_micro)


def _kept(stage: Stage, config: Config, sizes: Sizes, n_micro: int, optimizer: Any) -> Use:
    """What stays from step to step, by formula."""
    flat = stage.model.describe(config.run.seed, config.train.precision)
    itemsize, tried = flat.dtype.itemsize, optimizer(probe())
    kind = _cut_states(config, sizes)
    formula = predicted(flat.size, kind, sizes.replicas, itemsize=itemsize, states=len(tried.state))
    parameters, gradients, state = formula
    if kind in ("none", "optimizer"):
        gradients *= sums_at_once(n_micro, sizes.places, tree=config.train.reproducible == "layout")
    if config.optimizer.offload == "none":
        return Use(parameters, gradients, state, 0, None, None)
    on_host = 2 * formula.parameters if config.train.device == "gpu" else 0            # copies of parameters and gradients
    return Use(parameters, gradients, 0, state + on_host, None, None)


def _cut_states(config: Config, sizes: Sizes) -> str:
    """What of `comm.sharding` is cut; with one copy per node as if there were one node, whose copy has slices of its own."""
    if sizes.replicas == 1:
        return "none"
    kind: str = config.comm.sharding
    return {"optimizer": "none", "parameters": "gradients"}.get(kind, kind) if config.comm.node_shared else kind


def _on_their_way(stage: Stage, config: Config, sizes: Sizes) -> int:
    """Bytes of buckets, of what others send for them, and of blocks that are put together, where states are cut."""
    kind = _cut_states(config, sizes)
    if kind not in ("gradients", "parameters"):
        return 0
    flat = stage.model.describe(config.run.seed, config.train.precision)
    cuts = where_to_cut(stage, flat, blocks=kind == "parameters")
    buckets = plan_buckets(flat.segments, flat.size, max(1, config.comm.bucket_bytes // flat.dtype.itemsize), cuts)
    if config.comm.node_shared:                               # nothing is received
        return flat.dtype.itemsize * ring_size([b.stop - b.start for b in buckets], SHARED_AT_ONCE)
    largest = sum(sorted((b.stop - b.start for b in buckets), reverse=True)[:IN_FLIGHT + 1])
    received = largest * (sizes.replicas - 1) // sizes.replicas
    return flat.dtype.itemsize * (largest + received + (_put_together(stage) if kind == "parameters" else 0))


def _put_together(stage: Stage) -> int:
    """Parameters of the largest two neighbouring blocks of a stage."""
    largest = 0
    for chunk in stage.chunks:
        blocks = [nn.plan_segments(block.parameters())[1] for block in blocks_of(chunk)]
        largest = max([largest, *blocks, *(a + b for a, b in pairwise(blocks))])
    return largest


def sums_at_once(n_micro: int, n_places: int, *, tree: bool) -> int:
    """How many sums of micro-batches' gradients a rank keeps at most: see `parallel.gradients.reducer`."""
    found = 1
    for place_of_dp in range(n_places):
        first, stop = share(place_of_dp, n_places, n_micro)
        sums = Counter(partial(joins, n_micro=n_micro)) if tree else Counter()
        for leaf in range(first, stop):
            found = max(found, len(sums.nodes) + 1)
            sums.push(leaf, lambda lower: None)
        if tree:
            found = max(found, len(nodes_of(n_micro, n_places)[place_of_dp]))
    return found + (width(n_micro, n_places) if tree and n_places > 1 and width(n_micro, n_places) > 1 else 0)


def _activations(stages: Sequence[Stage], config: Config, n_micro: int, n_places: int, sample: tuple[Any, Any], *, loss: Any,
                 tokens: bool) -> list[int] | None:
    """Of each stage; None where nobody counts arrays."""
    pool = pool_in_use()
    if pool is None:
        return None
    n_stages, chunks = len(stages), len(stages[0].chunks)
    schedule = find_schedule(config)
    programs = [list(actions_of(schedule, stage.index, n_stages, -(-n_micro // n_places), chunks)) for stage in stages]
    parts = [stages[v % n_stages].chunks[v // n_stages] for v in range(n_stages * chunks)]
    courses: list[Course] = trace(parts, loss, *sample, _rows(config, n_micro), pool=pool, seed=config.run.seed,
                                  precision=config.train.precision, tokens=tokens, split=any(map(splits_backward, programs)))
    return [most(program, stage.virtual, courses) for stage, program in zip(stages, programs)]


# ---- measured ---------------------------------------------------------------------------------------------------------------

def measured(job: Job) -> Use:
    """What this rank has, by asking its arrays and their pool; after the last step."""
    reducer: GradientReducer = job.trainer.pipeline.reducer
    optimizer, sharding, storage = job.state.optimizer, job.state.sharding, job.state.model.storage
    assert optimizer is not None and storage is not None
    if sharding is not None and sharding.gathered is not None:
        parameters = sharding.shards.values
    else:
        parameters = storage.values                                         # type: ignore[attr-defined]
    state = optimizer.nbytes
    away = job.config.optimizer.offload != "none"
    gradients = sum(arena.nbytes for arena in reducer.arenas)
    use = Use(parameters.nbytes, gradients, 0 if away else state, state if away else 0, None, None)
    pool = pool_in_use()
    if pool is None or storage.device.name != "cpu":
        return use
    elsewhere = [parameters, *reducer.arenas, *(() if away else optimizer.state.values())]
    if isinstance(reducer, ShardedReducer) and reducer.memory is not None:
        elsewhere.append(reducer.memory.flat)
    shared = sum(array.nbytes for array in elsewhere if not is_own(array))
    swing = job.trainer.memory
    taken = pool.usage().system if swing.system is None else swing.system
    return use._replace(activations=swing.most, pool=taken + shared)


def is_own(array: Any) -> bool:
    """Whether a host array's memory is NumPy's, not shared with other processes or mapped from a file."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bool(array.flags.owndata)


# ---- in words ---------------------------------------------------------------------------------------------------------------

def forecast_lines(found: Forecast) -> Iterator[str]:
    """A table with a row for each stage."""
    names = _names(found.stages)
    yield "memory of a rank in MiB, predicted" + (f" (activations are not: {found.why})" if found.why else "")
    yield from table(("stage", *names), [(str(stage), *(_mib(getattr(use, name)) for name in names))
                                         for stage, use in enumerate(found.stages)])


def report_lines(found: Forecast, everyone: Sequence[tuple[int, Use]]) -> Iterator[str]:
    """Predicted beside measured, for the rank of each stage that has most; `everyone` is (stage, use) of all ranks."""
    names = _names([*found.stages, *(use for _, use in everyone)])
    rows = []
    for stage, predicted_use in enumerate(found.stages):
        rank = max((rank for rank, (where, _) in enumerate(everyone) if where == stage), key=lambda r: _sum(everyone[r][1]))
        use = everyone[rank][1]
        rows.append((str(stage), str(rank), *(f"{_mib(getattr(predicted_use, name))} / {_mib(getattr(use, name))}"
                                              for name in names)))
    yield "memory of a rank in MiB, predicted / measured" + (f" (activations were not predicted: {found.why})" if found.why
                                                             else "")
    yield from table(("stage", "rank", *names), rows)


def as_json(found: Forecast, everyone: Sequence[tuple[int, Use]]) -> dict[str, Any]:
    """Bytes: predicted of each stage, measured of each rank."""
    return {"predicted": [{"stage": stage, **use._asdict()} for stage, use in enumerate(found.stages)],
            "measured": [{"rank": rank, "stage": stage, **use._asdict()} for rank, (stage, use) in enumerate(everyone)]}


def _names(uses: Sequence[Use]) -> list[str]:
    return [name for name in Use._fields if name != "offloaded" or any(use.offloaded for use in uses)]


def _sum(use: Use) -> int:
    return sum(n or 0 for n in use)


def _mib(n: int | None) -> str:
    return "-" if n is None else f"{n / 2**20:,.2f}"
