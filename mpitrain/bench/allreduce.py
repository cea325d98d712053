"""Our all-reduce algorithms beside MPI_Allreduce, or with 16-bit messages beside float32 ones, in pairs; every sum checked.

    turn 0   fill ours    barrier  [ours]   slowest rank's time   check
    turn 1   fill MPI's   barrier  [MPI]    slowest rank's time   check
    turn 2   ...

Below 1 MiB a turn sums several arrays one after the other, because a clock and a barrier cost about as much as one small sum.
They are different arrays with different values, so each of these sums is checked too, against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.inputs import Inputs
from mpitrain.bench.pairs import Clock, Unavailable, alternate
from mpitrain.bench.report import Report, in_bytes, in_time, machine, ratio_of
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.algorithms import LIBRARY, names
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.node import Node
from mpitrain.registry import Registry

AT_ONCE = 1 << 20                 # One turn sums so many bytes, as far as MOST arrays allow.
MOST = 64
LINE = 128                        # A turn's arrays start on multiples of two cache lines, which are fetched together.


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Ordinary memory that begins on a multiple of LINE."""
    raw = np.empty(nbytes + LINE, np.uint8)
    shift = -raw.ctypes.data % LINE
    return raw[shift:shift + nbytes]


class Contender(NamedTuple):
    """A way to sum arrays over ranks; all ranks call its functions alike.

    `prepare(array)` gives what sums that array in place, each time it is called; `allocate(nbytes)` the uint8 memory that the
    arrays lie in, aligned to 64 bytes.
    """

    prepare: Callable[[np.ndarray[Any, Any]], Callable[[], object]]
    close: Callable[[], None]
    allocate: Callable[[int], np.ndarray[Any, Any]] = aligned


def native(world: World) -> Contender:
    """MPI_Allreduce itself, in place: what the others are measured against."""
    comm = world.comm.Dup()
    return Contender(lambda array: partial(comm.Allreduce, None, array), comm.Free)         # mpi4py's None here is MPI_IN_PLACE.


CONTENDERS: Registry[Callable[[World], Contender]] = Registry("all-reduce")
"""What is measured besides the ways of a channel. Called by all ranks; a contender makes communicators of its own."""
MESSAGES = "messages"
"""A channel's "auto": an algorithm for each size, as training has it where memory cannot be shared."""


@CONTENDERS.register("shared")
def shared(world: World) -> Contender:
    """Memory that the ranks of a node share, as training has it unless told otherwise; Unavailable where that cannot be had."""
    messages = Channel(world.comm.Dup(), "bench:shared")
    comm: Any = messages.comm
    node = Node(comm, messages.progress)
    channel = SharedChannel(messages, node)

    def close() -> None:
        channel.close()
        node.close()

    def allocate(nbytes: int) -> np.ndarray[Any, Any]:
        memory = channel.allocate(nbytes)
        if channel.notes:
            close()
            raise Unavailable(f"shared was asked for, but {channel.notes[0]}; or leave it out of --algorithms")
        return memory
    return Contender(lambda array: channel.prepare(array, "bench").run, close, allocate)


def known(wire: str | None = None) -> list[str]:
    """Every name that can be measured; with `wire`, those whose messages can hold such numbers."""
    own = [name for name in names() if name != "auto"] + [MESSAGES]
    return [*own, *CONTENDERS] if wire is None else [name for name in own if name != LIBRARY]


def contender(name: str, world: World, wire: str | None = None) -> Contender:
    """The contender of that name, on a communicator of its own. ConfigError or ScheduleError for a user's unusable one."""
    if name in CONTENDERS:
        assert wire is None, f"{name} sends no messages of ours"
        return CONTENDERS[name](world)
    channel = Channel(world.comm.Dup(), f"bench:{name}", algorithm="auto" if name == MESSAGES else name, wire=wire)
    return Contender(lambda array: channel.prepare(array, "bench").run, channel.close)


class Side:
    """One contender with memory for the largest of `sizes`, ready to be timed; `wire` is what its messages hold of float32."""

    def __init__(self, name: str, contender: Contender, world: World, sizes: Sequence[int], wire: str | None = None):
        self.name, self.close, self._prepare, self._wire = name, contender.close, contender.prepare, wire
        self._rank, self._clock = world.rank, Clock(world)
        self._arrays: dict[tuple[int, str], list[tuple[np.ndarray[Any, Any], Callable[[], object]]]] = {}
        self._memory = contender.allocate(max(arrays_a_turn(size) * stride(size) for size in sizes))

    def turn(self, inputs: Inputs, number: int) -> float:
        """Seconds of one sum of arrays like `inputs`. MpitrainError when a sum is wrong, on the ranks where it is."""
        nbytes = inputs.length * inputs.dtype.itemsize
        count, step = arrays_a_turn(nbytes), stride(nbytes)
        key = nbytes, str(inputs.dtype)
        if key not in self._arrays:                           # Each turn sums the same objects, as training does.
            views = [self._memory[i * step:i * step + nbytes].view(inputs.dtype) for i in range(count)]
            self._arrays[key] = [(view, self._prepare(view)) for view in views]
        arrays, sums = zip(*self._arrays[key])
        for i, array in enumerate(arrays):
            inputs.fill(array, self._rank, number * count + i)
        seconds = self._clock.time(partial(_call, sums)) / count
        for i, array in enumerate(arrays):
            inputs.check(array, number * count + i, f"all-reduce {self.name} of {nbytes} bytes of {inputs.dtype}", self._wire)
        return seconds


def _call(actions: Sequence[Callable[[], object]]) -> None:
    for action in actions:
        action()


def arrays_a_turn(nbytes: int) -> int:
    return min(MOST, max(1, AT_ONCE // nbytes))


def stride(nbytes: int) -> int:
    """Bytes from one array of a turn to the next."""
    return -(-nbytes // LINE) * LINE


def bench_allreduce(channel: Channel, world: World, report: Report, *, sizes: Sequence[int], algorithms: Sequence[str] | None,
                    dtypes: Sequence[str], pairs: int, wire: str | None = None) -> None:
    """One record for each algorithm, size and dtype. Collective; MpitrainError as soon as one sum is wrong.

    With `wire`, each algorithm is measured against itself with float32 messages. Without `algorithms`, what cannot be had here
    is left out.
    """
    about, theirs = machine(channel), "MPI" if wire is None else "float32"
    beside = "beside MPI_Allreduce" if wire is None else f"with messages of {wire} beside float32"
    report.line(f"all-reduce on {world.size} ranks {beside}; medians of {pairs} pairs, quartiles in brackets; "
                f"every sum checked\n{'algorithm':<24}{'bytes':>10}  {'dtype':<9}{wire or 'ours':>11}{theirs:>11}   times faster")
    for name in known(wire) if algorithms is None else algorithms:
        try:
            ours = Side(name, contender(name, world, wire), world, sizes, wire)
        except Unavailable as error:
            if algorithms is not None:
                raise
            report.line(f"{name:<24}left out: {error}")
            continue
        other = Side("of MPI", native(world), world, sizes) if wire is None else \
            Side(f"{name} in float32", contender(name, world), world, sizes)
        for dtype in dtypes:
            for size in sizes:
                inputs = Inputs(size // np.dtype(dtype).itemsize, dtype, world.size)
                result = alternate(partial(ours.turn, inputs), partial(other.turn, inputs), pairs).summary(theirs.lower())
                report.record({"bench": "allreduce", "algorithm": name, "bytes": size, "dtype": dtype, "ranks": world.size,
                               **result, "wire": wire or dtype, "arrays_a_turn": arrays_a_turn(size), "machine": about})
                report.line(f"{name:<24}{in_bytes(size):>10}  {dtype:<9}{in_time(result['seconds']):>11}"
                            f"{in_time(result[f'{theirs.lower()}_seconds']):>11}   {ratio_of(result)}")
        ours.close()
        other.close()
