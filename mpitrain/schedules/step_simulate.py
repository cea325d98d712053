"""Times one training step on a model of the machine: stages, collectives of layers, the exchange of gradients, stragglers.

    stage 0   F0 F1 .  .  B0--- B1---            |update
    stage 1   .  F0 F1 B0--- B1---               |
    exchange                  [b0][b1][b2]       |         what ends after the pipeline has is exposed

Every virtual stage has its seconds of a micro-batch, the collectives of its layers, which nothing hides, gathers that are
fetched ahead and hide behind its compute, and buckets of gradients, which leave while its last backward runs. Pure arithmetic:
no MPI, no arrays. All seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from mpitrain.errors import ConfigError
from mpitrain.schedules.grid import AXES, REPLICAS
from mpitrain.schedules.level_times import Level, level_seconds, message_seconds
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_simulate import Cost, simulate_pipeline
from mpitrain.schedules.stragglers import straggler_factor


class StepMachine(Protocol):
    """What a step needs to know of a machine; `machines.MachineFile` is one."""

    @property
    def levels(self) -> Sequence[Level]: ...
    @property
    def collective_s(self) -> float: ...
    @property
    def message_s(self) -> float: ...
    @property
    def spread(self) -> float: ...
    @property
    def overlap(self) -> float: ...


@dataclass(frozen=True)
class Collective:
    """`count` times `operation` ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") of `nbytes` (the whole array) over
    the ranks that differ along `axes`."""

    operation: str
    axes: tuple[str, ...]
    nbytes: float
    count: float = 1.0


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together once `ready` (0 to 1) of their virtual stage's last backward is done."""

    nbytes: float
    ready: float
    operation: str = "all_reduce"
    axes: tuple[str, ...] = REPLICAS


@dataclass(frozen=True)
class Stage:
    """A virtual stage: seconds of one micro-batch's compute, and what it sends.

    forward, backward, weight      seconds: the forward, the gradient of the input, the gradients of the parameters
    message_bytes                  activation that leaves it for the next one (a rank's share), and its gradient, which comes back
    in_forward, in_backward        collectives of a micro-batch that compute waits for: tensor, expert, context parallelism
    fetched_forward, fetched_backward   those of a micro-batch that hide behind the compute: parameters of sharded layers
    buckets                        the exchange of gradients, once a step, in the order in which they leave
    """

    forward: float
    backward: float
    weight: float = 0.0
    message_bytes: float = 0.0
    in_forward: tuple[Collective, ...] = ()
    in_backward: tuple[Collective, ...] = ()
    fetched_forward: tuple[Collective, ...] = ()
    fetched_backward: tuple[Collective, ...] = ()
    buckets: tuple[Bucket, ...] = ()


@dataclass(frozen=True)
class Work:
    """What a step has to do: its virtual stages in order (chunk c of stage s of p is number c p + s), the seconds of the update,
    and collectives after it that nothing hides (all-gather of parameters)."""

    stages: tuple[Stage, ...]
    update: float = 0.0
    after: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and its parts, whose sum they are; those of the rank that computes longest.

    compute       forward and backward of its micro-batches           update      of the optimizer
    tensor        collectives of its layers, and gathers that compute does not hide
    bubble        it waits for other stages and for their messages
    exposed       exchange of gradients (and of parameters) that compute does not hide
    stragglers    the slowest of all ranks over the mean one
    """

    total: float
    compute: float
    bubble: float
    tensor: float
    exposed: float
    update: float
    stragglers: float


def group(mesh: Mapping[str, int], axes: Sequence[str]) -> tuple[int, int]:
    """How many ranks differ along `axes`, and how far they are apart (further, where other axes lie between them)."""
    lengths = [mesh.get(axis, 1) for axis in AXES]
    n = prod(mesh.get(axis, 1) for axis in axes)
    strides = [prod(lengths[i + 1:]) for i, axis in enumerate(AXES) if axis in axes and lengths[i] > 1]
    if not strides:
        return 1, 1
    extent = max(stride * mesh[axis] for axis, stride in
                 ((axis, prod(lengths[i + 1:])) for i, axis in enumerate(AXES) if axis in axes and lengths[i] > 1))
    return n, strides[-1] if extent == n * strides[-1] else strides[0]


def simulate_step(work: Work, mesh: Mapping[str, int], schedule: str, n_micro: int, machine: StepMachine, *,
                  algorithm: str = "auto") -> StepTime:
    """Seconds of a step of `n_micro` micro-batches (of each data-parallel rank) on `mesh` (lengths of axes pp, dp, ep, cp, tp).

    ConfigError where the virtual stages are no multiple of mesh pp, and as of `simulate_pipeline`.
    """
    pp, n_stages = mesh.get("pp", 1), len(work.stages)
    if not n_stages or n_stages % pp:
        raise ConfigError(f"{n_stages} virtual stages do not lie evenly on pp = {pp}; give a multiple of it")
    chunks = n_stages // pp

    def seconds(collectives: Sequence[Collective]) -> float:
        total = 0.0
        for one in collectives:
            n, stride = group(mesh, one.axes)
            if n > 1:
                total += one.count * (level_seconds(one.operation, n, stride, one.nbytes, machine.levels, algorithm)
                                      + machine.collective_s)
        return total
    forwards, backwards, tensors = [], [], []
    own = 2 * machine.message_s if pp > 1 else 0.0            # a micro-batch's message in and out
    for stage in work.stages:
        ahead = max(0.0, seconds(stage.fetched_forward) - stage.forward * machine.overlap)
        back = max(0.0, seconds(stage.fetched_backward) - (stage.backward + stage.weight) * machine.overlap)
        in_forward, in_backward = seconds(stage.in_forward) + ahead + own, seconds(stage.in_backward) + back + own
        forwards.append(stage.forward + in_forward)
        backwards.append(stage.backward + in_backward)
        tensors.append(in_forward + in_backward)
    weights = [stage.weight for stage in work.stages]
    _, pp_stride = group(mesh, ("pp",))
    messages = [message_seconds(pp, pp_stride, stage.message_bytes, machine.levels) for stage in work.stages]
    timeline = simulate_pipeline(SCHEDULES.resolve(schedule), pp, n_micro,
                                 Cost(forwards, backwards, weights, 0.0, 1.0, messages), chunks)
    ends = []
    for place, spans in enumerate(timeline.spans):
        begun = {}
        for span in spans:
            if span.action.kind in ("B", "W") and span.action.micro == n_micro - 1:
                begun[span.action.chunk] = span
        ready = []
        for chunk, span in begun.items():
            for bucket in work.stages[chunk * pp + place].buckets:
                ready.append((span.start + bucket.ready * (span.stop - span.start), bucket))
        free, taken = 0.0, 0.0
        for at, bucket in sorted(ready, key=lambda one: one[0]):
            n, stride = group(mesh, bucket.axes)
            if n == 1:
                continue
            lasts = level_seconds(bucket.operation, n, stride, bucket.nbytes, machine.levels, algorithm)
            free = max(free, at) + lasts
            taken += machine.collective_s + (1 - machine.overlap) * lasts
        ends.append(max(free, (spans[-1].stop if spans else 0.0) + taken))
    busy = [(n_micro * sum(stage.forward + stage.backward + stage.weight for stage in work.stages[s::pp]),
             n_micro * sum(tensors[s::pp])) for s in range(pp)]
    compute, tensor = max(busy, key=sum)
    exposed = max(0.0, max(ends) - timeline.total) + seconds(work.after)
    ranks = prod(mesh.get(axis, 1) for axis in AXES)
    stragglers = (compute + work.update) * (straggler_factor(ranks, machine.spread) - 1)
    total = timeline.total + exposed + work.update + stragglers
    return StepTime(total, compute, timeline.total - compute - tensor, tensor, exposed, work.update, stragglers)
