"""Buckets of gradients whose sum over ranks, or over nodes, travels compressed.

    ranks of one node                 between nodes                         in a bucket
    sum in shared memory, exact  -->  each rank's slice, compressed  -->    slices are cut at blocks, or between parameters

Where nodes have one rank each, memory cannot be shared, or `comm.compress_force` says so, all of a bucket goes by messages
between all ranks. A **worker** is who compresses by itself, and keeps what its messages leave out: a node in the first case, of
which each rank has a slice, a rank in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.algorithms import hosts_of
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.meter import Meter, metered
from mpitrain.comm.messages.prepare import Landed, Prepared, make_plan
from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.work import Collective, Work
from mpitrain.nn import FlatLayout, Parameter
from mpitrain.parallel.compress.compressor import STAGES, Compressor, Make, Piece, State, block_bounds
from mpitrain.parallel.compress.exchange import Clock, CodedWork, Exchange, steps_of
from mpitrain.parallel.compress.pieces import overlapping, pieces_of
from mpitrain.parallel.compress.programs import cut_evenly
from mpitrain.placement.buckets import Bucket


class Part(NamedTuple):
    """Elements [start, stop) of the flat gradient, which this rank compresses in the exchange of one bucket."""

    start: int
    stop: int
    exchange: Exchange | None                                 # None: there is nothing to exchange
    first: tuple[Exchange, ...] = ()                          # of the warm-up's stages, with the same state


class Held(NamedTuple):
    """A parameter's elements from `first` on, of a flat array of state."""

    leaf: Parameter
    first: int
    array: Host


class CompressedSum:
    """Every rank has the whole sum: `gradients.bucket_sum.BucketSum`. `open` it before the first step, on all ranks.

    `step()` is the number of steps done; the first `after` are not compressed, and in the `warmup` steps behind them STAGES times
    as much travels as `make` says, each in an equal part of them. With `feedback`, what a message leaves out is added to the next
    one.
    """

    tree = None
    compares = True                                           # A run finds out whether dense sums would be faster.
    rounds = 1                                                # sums of a bucket in a step

    def __init__(self, channel: AnyChannel, layout: FlatLayout, make: Make, *, step: Callable[[], int], seed: int = 0,
                 feedback: bool = True, after: int = 0, warmup: int = 0):
        self.channel, self.layout, self.make, self.size = channel, layout, make, channel.size
        self.step, self.seed, self.feedback, self.after = step, seed, feedback, after
        self.settled = after + warmup                         # From this step on messages are as `make` says.
        self.stages = [wide for times in STAGES if warmup and (wide := make.wider(times)) is not None]
        self.clock = Clock()
        self.flat: dict[str, Host] = {}                       # states of workers and owners, in the layout of the gradients
        self.owners: dict[str, str] = {}                      # whose they are: "worker" or "owner"
        self.common: dict[str, State] = {}                    # states that are equal on all workers, by bucket
        self.parts: dict[int, Part] = {}                      # by the start of the bucket
        self.shared: SharedChannel | None = None
        self.peers: Channel = channel.messages
        self.coded_bytes = self.dense_bytes = 0               # that this rank posts in a step of which all is trained
        self.dense_of: dict[int, int] = {}                    # the latter of each bucket, by its start
        self.dense_sent = 0                                   # what all sums begun so far would have posted if they were dense

    def connect(self) -> None:
        """Finds out who the workers are, once the memory of the gradients has been asked for."""
        if isinstance(self.channel, SharedChannel) and self.channel.cross is not None and not self.channel.notes:
            self.shared, self.peers = self.channel, self.channel.cross

    def open(self, buckets: Sequence[Bucket]) -> None:
        """Makes the exchanges of these buckets. It communicates."""
        hosts = list(range(self.peers.size)) if self.shared is not None else hosts_of(self.peers.comm)
        self.meter: Meter = metered(self.peers, hosts)
        for bucket in buckets:
            if bucket.trained_ever:
                self.parts[bucket.start] = self._part(bucket)
        self.dense_of = self._dense_of()
        self.coded_bytes, self.dense_bytes = self.rounds * self._sent_coded(), self.rounds * sum(self.dense_of.values())

    @property
    def workers(self) -> int:
        return self.peers.size

    @property
    def worker(self) -> int:
        """The number of this rank's worker."""
        return self.peers.rank

    @property
    def share(self) -> float:
        """This rank's share of its worker."""
        return 1.0 if self.shared is None else 1 / self.shared.node.size

    @property
    def compresses(self) -> bool:
        """Whether the present step is compressed."""
        return self.step() >= self.after

    def now(self, part: Part) -> Exchange | None:
        """The exchange of a part in the present step."""
        step = self.step()
        if not part.first or step >= self.settled:
            return part.exchange
        return part.first[(step - self.after) * len(part.first) // (self.settled - self.after)]

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        array, part, dense = arrays[0], self.parts[bucket.start], self.dense(bucket, arrays)
        if self.shared is None:
            coded: Callable[[], Work] = partial(self._start_by_messages, part, array)
        else:
            coded = self.shared.prepare_across(array, bucket.name, (part.start - bucket.start, part.stop - bucket.start),
                                               partial(self._start_across, part)).start
        return self.counted(bucket, lambda: coded() if self.compresses else dense.start())

    def counted(self, bucket: Bucket, start: Callable[[], Work]) -> Prepared:
        """The sum of a bucket that `start` begins, of which `dense_sent` tells."""
        def begin() -> Work:
            self.dense_sent += self.dense_of[bucket.start]
            return start()
        return Prepared(begin)

    def dense(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        """The same sum, as it is without compression."""
        return self.channel.prepare(arrays[0], bucket.name)

    def copied_state(self) -> list[Host]:
        return [array.copy() for array in self._arrays()]

    def restore_state(self, copied: Sequence[Host]) -> None:
        for array, values in zip(self._arrays(), copied, strict=True):
            array[...] = values

    def _arrays(self) -> Iterator[Host]:
        """All arrays of state, as far as this rank writes them."""
        for part in self.parts.values():
            if part.exchange is not None:
                yield from part.exchange.state.values()

    def held(self, name: str, *, owned: bool = False) -> Iterator[Held]:
        """The parts of the flat state `name` that this rank has (`owned`: as the one that sums them), by parameter."""
        flat = self.flat[name]
        for part in self.parts.values():
            start, stop = part.start, part.stop
            if owned and part.exchange is not None:
                start, stop = (part.start + bound for bound in part.exchange.owned)
            for segment in overlapping(self.layout.segments, start, stop):
                low, high = max(start, segment.start), min(stop, segment.stop)
                if low < high:
                    yield Held(segment.parameter, low - segment.start, flat[low:high])

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of this rank, as far as they are ever written."""
        whole = sum(part.stop - part.start for part in self.parts.values())
        owned = sum(part.exchange.owned[1] - part.exchange.owned[0] for part in self.parts.values() if part.exchange is not None)
        flat = sum(4 * (owned if of == "owner" else whole) for of in self.owners.values())
        return flat + sum(array.nbytes for state in self.common.values() for array in state.values())

    def _sent_coded(self) -> int:
        """Bytes that this rank posts in a compressed step."""
        return sum(part.exchange.sent for part in self.parts.values() if part.exchange is not None)

    def _dense_of(self) -> dict[int, int]:
        """Bytes that it would post for each bucket if nothing were compressed, by the same channel."""
        def sent(length: int) -> int:
            plan = make_plan(steps_of(self.peers, length), self.peers.rank, self.peers.size, length, 4)
            return HEADER_BYTES + sum(stop - start for round_ in plan.rounds for _, start, stop, _ in round_.sends)
        return {start: sent(part.stop - part.start) if part.exchange is not None else 0 for start, part in self.parts.items()}

    def _start_by_messages(self, part: Part, array: Host) -> Work:
        exchange = self.now(part)
        return Landed() if exchange is None else self.peers.progress.added(exchange.start(array))

    def _start_across(self, part: Part, values: Host, text: str) -> CodedWork | Landed:
        exchange = self.now(part)
        return Landed() if exchange is None else exchange.start(values)

    def _part(self, bucket: Bucket) -> Part:
        start, stop = bucket.start, bucket.stop
        if self.shared is not None:
            node = self.shared.node
            bounds = self._cuts(pieces_of(bucket.segments, start, stop))
            cuts = cut_evenly(bounds, node.size)
            low, high = bounds[cuts[node.rank]], bounds[cuts[node.rank + 1]]
            start, stop = bucket.start + low, bucket.start + high if node.rank < node.size - 1 else stop
        pieces = pieces_of(bucket.segments, start, stop)
        if not pieces:
            return Part(start, stop, None)
        name = bucket.name if self.shared is None else f"slice {self.shared.node.rank} of {bucket.name}"

        def exchange(make: Make) -> Exchange:
            compressor = make(pieces, self.workers, seed=self.seed, feedback=self.feedback)
            state = self._state(compressor, start, bucket.name)
            return Exchange(self.peers, compressor, make.text, state, name, self.step, self.clock)
        return Part(start, stop, exchange(self.make), tuple(map(exchange, self.stages)))

    def _cuts(self, pieces: Sequence[Piece]) -> list[int]:
        """Where a slice may begin: at blocks, or at parameters alone."""
        block = self.make.block
        if block is not None:
            return [int(bound) for bound in block_bounds(pieces, block)]
        return [*(piece.start for piece in pieces), pieces[-1].stop]

    def _state(self, compressor: Compressor, start: int, name: str) -> State:
        state: State = {}
        for key, kept in compressor.states().items():
            if kept.of == "all":
                state[key] = self.common.setdefault(name, {})[key] = np.zeros(kept.shape, np.float32)
                continue
            assert kept.shape == (compressor.length,), f"the state {key} of {self.make.text} has no place for each element"
            flat = self.flat.get(key)
            if flat is None:
                flat, self.owners[key] = self.layout.new_flat(), kept.of
                self.flat[key] = flat
            state[key] = flat[start:start + compressor.length]
        compressor.begin(state)
        return state
