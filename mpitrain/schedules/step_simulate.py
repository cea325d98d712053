"""Times one training step on a model of the machine: stages, collectives of layers, the exchange of gradients, stragglers.

    stage 0    F0 F1 .  .  B0--- B1---            update
    stage 1    .  F0 F1 B0--- B1---  .            update
    exchange                  [b0][b1][b2]                what ends after the pipeline has is exposed

Every virtual stage has its seconds of a micro-batch, the collectives of its layers, which nothing hides, gathers that are fetched
ahead and hide behind its compute, and buckets of gradients, which leave while its last backward runs. Pure arithmetic: no MPI,
no arrays. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

from mpitrain.errors import ConfigError
from mpitrain.schedules.grid import AXES, REPLICAS
from mpitrain.schedules.level_times import Level, level_seconds, message_seconds, stream_seconds
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_times import PipelineTimes, pipeline_times
from mpitrain.schedules.pipeline_turns import waiting_weight
from mpitrain.schedules.steps import Algorithm
from mpitrain.schedules.stragglers import straggler_factor


class StepMachine(Protocol):
    """What a step needs to know of a machine; `machines.MachineFile` is one, which explains them."""

    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def collective_s(self) -> float: ...
    @property
    def message_s(self) -> float: ...
    @property
    def spread(self) -> float: ...
    @property
    def overlap(self) -> float: ...
    @property
    def cores(self) -> float: ...


@dataclass(frozen=True)
class Collective:
    """`count` times `operation` ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") of `nbytes` (the whole array) over
    the ranks that differ along `axes`. `seconds` of one, where they are known otherwise."""

    operation: str
    axes: tuple[str, ...]
    nbytes: float
    count: float = 1.0
    seconds: float | None = None


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together once `ready` (0 to 1) of their virtual stage's last backward is done."""

    nbytes: float
    ready: float
    operation: str = "all_reduce"
    axes: tuple[str, ...] = REPLICAS
    seconds: float | None = None


@dataclass(frozen=True)
class Stage:
    """A virtual stage: seconds of one micro-batch's compute, and what it sends.

    forward, backward, weight      seconds: the forward, the gradient of the input, the gradients of the parameters
    message_bytes                  activation that leaves it for the next one (a rank's share), and its gradient, which comes back
    in_forward, in_backward        collectives of a micro-batch that compute waits for: tensor, expert, context parallelism
    fetched_forward, fetched_backward   those of a micro-batch that hide behind the compute: parameters of sharded layers
    buckets                        the exchange of gradients, once a step
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

    @property
    def compute(self) -> float:
        """Seconds of a micro-batch."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Work:
    """What a step has to do: its virtual stages in order (chunk c of stage s of p is number c p + s), the seconds of the update,
    and collectives after it that nothing hides (all-gather of parameters)."""

    stages: tuple[Stage, ...]
    update: float = 0.0
    after: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and its parts, whose sum they are; those of the stage that has most to do.

    compute       forward and backward of its micro-batches, and its own part in moving gradients meanwhile
    update        of the optimizer
    tensor        collectives of its layers, and gathers that compute does not hide
    bubble        it waits for other stages, for messages between them, and for a core that they share
    exposed       exchange of gradients after the last backward, and of parameters that compute does not hide
    stragglers    the slowest of all ranks beyond the mean one
    """

    total: float
    compute: float
    bubble: float
    tensor: float
    exposed: float
    update: float
    stragglers: float


def simulate_step(work: Work, mesh: Mapping[str, int], schedule: str | Schedule, n_micro: int, machine: StepMachine, *,
                  algorithm: str | Algorithm = "auto") -> StepTime:
    """Seconds of a step of `n_micro` micro-batches (of each data-parallel rank) on `mesh` (lengths of axes pp, dp, ep, cp, tp).

    Where a host has fewer cores than ranks, these take turns: all of them at once, or as many stages as are at work.
    ConfigError where the virtual stages are no multiple of mesh pp; ScheduleError as of `simulate_pipeline`.
    """
    pp, n_virtual = mesh.get("pp", 1), len(work.stages)
    if not n_virtual or n_virtual % pp:
        raise ConfigError(f"{n_virtual} virtual stages do not lie evenly on pp = {pp}; give a multiple of it")
    side = _Side(mesh, machine, algorithm)
    extras = [side.of_layers(stage) for stage in work.stages]
    turns = 1.0 if pp > 1 else side.turns
    times = pipeline_times(schedule, pp, n_micro, [turns * s.forward + extra[0] for s, extra in zip(work.stages, extras)],
                           [turns * s.backward + extra[1] for s, extra in zip(work.stages, extras)],
                           [turns * s.weight for s in work.stages], [side.message(s.message_bytes) for s in work.stages],
                           *((pp / side.turns, waiting_weight(side.ranks, side.cores)) if pp > 1 else ()))
    compute, tensor = max(((n_micro * turns * sum(stage.compute for stage in work.stages[s::pp]),
                            n_micro * sum(map(sum, extras[s::pp]))) for s in range(pp)), key=sum)
    ends = [side.exchange(work.stages[s::pp], times, s, pp) for s in range(pp)]
    computed = max(times.total, *(stop for stop, _ in ends))
    exposed = max(0.0, max(end for _, end in ends) - computed) + side.seconds(work.after)
    ranks = prod(mesh.get(axis, 1) for axis in AXES)
    stragglers = (compute + work.update) * (straggler_factor(ranks, machine.spread) - 1)
    bubble = times.total - compute - tensor
    compute += computed - times.total                         # its own core moved messages meanwhile
    return StepTime(computed + exposed + work.update + stragglers, compute, bubble, tensor, exposed,
                    work.update, stragglers)


class _Side:
    """The side of a step that is not compute: what its messages take on one mesh, with one algorithm for sums."""

    def __init__(self, mesh: Mapping[str, int], machine: StepMachine, algorithm: str | Algorithm):
        self.machine, self.algorithm = machine, algorithm
        self.lengths = tuple(mesh.get(axis, 1) for axis in AXES)
        self.pp = mesh.get("pp", 1)
        self.ranks = prod(self.lengths)                       # of a host
        if machine.levels:
            self.ranks = min(self.ranks, machine.levels[0].ranks or self.ranks)
        self.turns = max(1.0, self.ranks / machine.cores) if machine.cores else 1.0    # ranks of a host that share a core
        self.cores = max(1, round(self.ranks / self.turns))

    def one(self, operation: str, axes: tuple[str, ...], nbytes: float, seconds: float | None) -> float:
        """Seconds of a collective, without the interpreter's."""
        if seconds is not None:
            return seconds
        n, stride = group(self.lengths, axes)
        return level_seconds(operation, n, stride, nbytes, self.machine.levels, self.algorithm)

    def seconds(self, collectives: Sequence[Collective]) -> float:
        """Seconds of collectives one after the other; of lone ranks they take none."""
        total = 0.0
        for each in collectives:
            lasts = self.one(each.operation, each.axes, each.nbytes, each.seconds)
            total += each.count * (lasts + self.machine.collective_s) if lasts else 0.0
        return total

    def of_layers(self, stage: Stage) -> tuple[float, float]:
        """What a micro-batch's messages add to the forward and the backward of a stage, beside what hides behind its compute."""
        ahead = self.seconds(stage.fetched_forward) - stage.forward * self.machine.overlap
        back = self.seconds(stage.fetched_backward) - (stage.backward + stage.weight) * self.machine.overlap
        own = 2 * self.machine.message_s if self.pp > 1 else 0.0             # a message comes in and one leaves
        return (max(0.0, ahead) + self.seconds(stage.in_forward) + own, max(0.0, back) + self.seconds(stage.in_backward) + own)

    def message(self, nbytes: float) -> float:
        n, stride = group(self.lengths, ("pp",))
        return message_seconds(n, stride, nbytes, self.machine.levels)

    def exchange(self, stages: Sequence[Stage], times: PipelineTimes, place: int, pp: int) -> tuple[float, float]:
        """When pipeline stage `place` has computed, and when it has exchanged its gradients: bucket after bucket, as they get
        ready. While one is on its way the stage computes at the speed `overlap`: its own core moves the rest, and at 0 might as
        well do so afterwards. Of those that are on their way together, one's bytes travel while another waits for its round."""
        ready = []
        for chunk, stage in enumerate(stages):
            begins, ends = times.last[chunk * pp + place]
            ready += [(begins + bucket.ready * (ends - begins) if self.machine.overlap else times.stops[place], bucket)
                      for bucket in stage.buckets]
        now, computed, free = 0.0, 0.0, 0.0
        for at, bucket in sorted(ready, key=lambda pair: pair[0]):
            lasts = self.one(bucket.operation, bucket.axes, bucket.nbytes, bucket.seconds)
            if lasts:
                now = computed_at(now, at - computed, free, self.machine.overlap) + self.machine.collective_s
                computed, free = at, max(now + lasts, max(free, now) + self.following(bucket, lasts))
        now = computed_at(now, times.stops[place] - computed, free, self.machine.overlap)
        return now, max(free, now)

    def following(self, bucket: Bucket, lasts: float) -> float:
        """Seconds after the bucket before it at which one is there that left while that was on its way: all that it takes alone,
        where nobody has measured less."""
        if bucket.seconds is not None or bucket.operation != "all_reduce" or self.algorithm != "auto":
            return lasts
        n, stride = group(self.lengths, bucket.axes)
        found = stream_seconds(n, stride, bucket.nbytes, self.machine.levels)
        return lasts if found is None else found


def computed_at(now: float, left: float, free: float, speed: float) -> float:
    """When `left` seconds of computing are done that begin at `now`, at `speed` (0 to 1) until the link is `free`."""
    slow = max(0.0, free - now)
    if left <= 0:
        return now
    return now + left / speed if left <= slow * speed else now + slow + left - slow * speed


@lru_cache(maxsize=4096)
def group(lengths: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int]:
    """How many ranks differ along `axes` of a mesh of these lengths, and how far they are apart.

    Where other axes lie between them (experts between dp and cp), they are as far apart as along the outermost one.
    """
    strides = {axis: prod(lengths[i + 1:]) for i, axis in enumerate(AXES) if axis in axes and lengths[i] > 1}
    if not strides:
        return 1, 1
    size = dict(zip(AXES, lengths))
    n, inner, outer = prod(size[axis] for axis in strides), min(strides.values()), max(strides.values())
    extent = outer * next(size[axis] for axis, stride in strides.items() if stride == outer)
    return n, inner if extent == n * inner else outer
