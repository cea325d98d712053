"""Slices of a bucket as blocks of few bits: what ranks that cut states among them send each other (ZeRO++; Wang et al., 2023).

    gradients     each rank's contribution is rounded once, and its owner adds all of them up in float32, in the ranks' order
    parameters    owners keep float32, and round what they send; all ranks, owners too, compute with what was sent

Slices begin and end at blocks of 4,096 elements of a parameter, or between parameters, so that the blocks of a packed compressor
are the same whoever owns them, and bits do not depend on the number of ranks but by the order of additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.program import MESSAGE_BYTES, Stage
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature
from mpitrain.comm.work import Collective, Work
from mpitrain.parallel.compress.channel import CompressedSum, Part
from mpitrain.parallel.compress.compressor import OWNER, Compressor, Make, Packed, State
from mpitrain.parallel.compress.exchange import Clock, Exchange
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.parallel.compress.programs import ARRIVED, VALUES, WIRE, Memory, Program, framed, rounds_of, seen
from mpitrain.placement.buckets import Bucket
from mpitrain.placement.shards import Shards
from mpitrain.schedules.direct import OwnersToAll
from mpitrain.schedules.steps import Slice


class Cut:
    """The blocks of a compressor, and the bytes of their messages, that each rank owns; `bounds` are the elements where slices
    begin, and the end. What lies behind the last parameter is in no block."""

    def __init__(self, c: Packed, bounds: Sequence[int]):
        of_blocks = c.bounds.tolist()
        ends = [bisect_left(of_blocks, min(bound, of_blocks[-1])) for bound in bounds]
        assert all(of_blocks[end] == min(bound, of_blocks[-1]) for end, bound in zip(ends, bounds)), "a slice ends in a block"
        self.blocks = list(pairwise(ends))
        self.sizes = [c.nbytes(first, stop) if stop > first else 0 for first, stop in self.blocks]
        self.elements = [slice(of_blocks[first], of_blocks[stop]) for first, stop in self.blocks]
        self.places = (0, *accumulate(self.sizes))            # of the messages, one behind the other, in bytes

    def message(self, wire: Host, rank: int) -> Host:
        """The message of a rank's slice among all of them."""
        found: Host = wire[self.places[rank]:self.places[rank + 1]]
        return found


class PackedGather:
    """Gives all ranks of `channel` the slices of one array that each of them owns, rounded."""

    def __init__(self, channel: Channel, compressor: Packed, bounds: Sequence[int], name: str, clock: Clock):
        self.channel, self.compressor, self.name, self.clock = channel, compressor, name, clock
        self.cut = Cut(compressor, bounds)
        self._algorithm = OwnersToAll(self.cut.places)

    @property
    def sent(self) -> int:
        """Bytes that this rank posts for each, with the header."""
        return (self.channel.size - 1) * self.cut.sizes[self.channel.rank] + HEADER_BYTES

    def start(self, own: Host, target: Host) -> Unpacking:
        """Begin to write all slices into `target`, this rank's `own` as all others get it."""
        wire = self.channel.pools.host.take(self.cut.places[-1])
        message = wire[:self.cut.places[-1]]
        began = perf_counter()
        self._encode(own, self.cut.message(message, self.channel.rank), *self.cut.blocks[self.channel.rank])
        self.clock.seconds += perf_counter() - began
        work = self.channel.start_all_gather(message, self._algorithm, self.name) if message.size else None
        return Unpacking(self, work, wire, target)

    def round(self, values: Host) -> None:
        """Writes what all would get of these values, in place, where a rank has all of them. Nothing is sent."""
        wire = np.empty(self.cut.places[-1], np.uint8)
        for rank, (blocks, own) in enumerate(zip(self.cut.blocks, self.cut.elements)):
            self._encode(values[own], self.cut.message(wire, rank), *blocks)
        self.decode(wire, values)

    def _encode(self, values: Host, message: Host, first: int, stop: int) -> None:
        if stop > first:
            self.compressor.encode(0, OWNER, values[:self.cut_length(first, stop)], None, first, stop, message)

    def cut_length(self, first: int, stop: int) -> int:
        """The elements of blocks first .. stop."""
        return int(self.compressor.bounds[stop] - self.compressor.bounds[first])

    def decode(self, wire: Host, target: Host) -> None:
        """Writes the slices of all messages into `target`."""
        began = perf_counter()
        for rank, ((first, stop), own) in enumerate(zip(self.cut.blocks, self.cut.elements)):
            if stop > first:
                self.compressor.decode(self.cut.message(wire, rank), first, stop, target[own], False)
        self.clock.seconds += perf_counter() - began


class Unpacking:
    """A gather of messages on its way, which become numbers when they have landed."""

    def __init__(self, gather: PackedGather, work: Work | None, wire: Host, target: Host):
        self._gather, self._work, self._wire, self._target = gather, work, wire, target
        self.done = False

    def test(self) -> bool:
        if not self.done and (self._work is None or self._work.test()):
            self._unpack()
        return self.done

    def wait(self) -> None:
        if not self.done:
            if self._work is not None:
                self._work.wait()
            self._unpack()

    def _unpack(self) -> None:
        if self._work is not None:
            self._gather.decode(self._wire, self._target)
        self._gather.channel.pools.host.give(self._wire)
        self.done = True


class SliceExchange(Exchange):
    """The compressed sum of a bucket of which each rank keeps its slice; the others' slices are left as they were encoded."""

    def __init__(self, channel: Channel, compressor: Packed, bounds: Sequence[int], text: str, state: State, name: str,
                 step: Callable[[], int], clock: Clock):
        self.channel, self.compressor, self.state, self.clock = channel, compressor, state, clock
        self._program = to_owners(compressor, Cut(compressor, bounds), channel.rank, state, step)
        self._signature = Signature.of(f"sum to owners by {text} of", name, "float32", compressor.length)

    @property
    def owned(self) -> tuple[int, int]:
        return 0, 0                                           # No sum is rounded.


def to_owners(c: Packed, cut: Cut, rank: int, state: State, step: Callable[[], int],
              message_bytes: int = MESSAGE_BYTES) -> Program:
    """Every rank encodes the slices of all owners, and each owner adds up what it gets, its own as it would have been sent."""
    wire = [Slice(WIRE, start, stop) for start, stop in pairwise(cut.places)]
    others = [(rank + hop) % c.n for hop in range(1, c.n)]
    size, own, error = cut.sizes[rank], cut.elements[rank], state.get("error")
    slots = {peer: Slice(ARRIVED, size * i, size * (i + 1)) for i, peer in enumerate(sorted(others))} | {rank: wire[rank]}

    def encode(memory: Memory) -> None:
        for i in (*others, rank):
            if cut.sizes[i]:
                part = cut.elements[i]
                c.encode(step(), rank, memory[VALUES][part], None if error is None else error[part], *cut.blocks[i],
                         seen(memory, wire[i]))

    def add_up(memory: Memory) -> None:
        for worker in range(c.n if size else 0):
            c.decode(seen(memory, slots[worker]), *cut.blocks[rank], memory[VALUES][own], worker > 0)

    stage = Stage((), tuple((slots[peer], peer) for peer in reversed(others) if size),
                  tuple((wire[peer], peer) for peer in others if cut.sizes[peer]), ())
    rounds = framed(rounds_of([stage], 1, message_bytes), encode, add_up)
    return Program(rounds, {WIRE: cut.places[-1], ARRIVED: size * (c.n - 1)})


class CompressedSlices(CompressedSum):
    """Each rank has the sum of its slices of the buckets, which are the units of `shards`; all goes by messages, in each of the
    `rounds` of a step."""

    compares = False                                          # Its buckets do not lie in one array of gradients.

    def __init__(self, channel: Channel, shards: Shards, make: Make, *, step: Callable[[], int], seed: int = 0,
                 feedback: bool = False, after: int = 0, rounds: int = 1):
        super().__init__(channel, shards.layout, make, step=step, seed=seed, feedback=feedback, after=after)
        self.shards, self.rounds = shards, rounds

    def dense(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        unit = self.shards.units[bucket.index]
        own = unit.within.start, unit.within.stop
        return self.peers.prepare_slice(arrays[0], bucket.name, own, unit.sum_to_owners)

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        part, array = self.parts[bucket.start], arrays[0]
        dense = self.dense(bucket, arrays)
        coded = partial(self._start_by_messages, part, array)
        return self.counted(bucket, lambda: coded() if self.compresses else dense.start())

    def _part(self, bucket: Bucket) -> Part:
        unit = self.shards.units[bucket.index]
        compressor = self.make(pieces_of(bucket.segments, bucket.start, bucket.stop), self.workers, seed=self.seed,
                               feedback=self.feedback)
        assert isinstance(compressor, Packed)
        state = self._state(compressor, bucket.start, bucket.name)
        return Part(bucket.start, bucket.stop, SliceExchange(self.peers, compressor, unit.owners_to_all.bounds, self.make.text,
                                                             state, bucket.name, self.step, self.clock))

    def _state(self, compressor: Compressor, start: int, name: str) -> State:
        state = super()._state(compressor, start, name)
        kept: list[dict[str, Any]] = [state, self.flat, self.owners]
        for one in kept:
            one.pop("sum_error", None)                        # No sum is rounded.
        return state

    def _dense_of(self) -> dict[int, int]:
        itemsize = self.layout.dtype.itemsize
        return {unit.start: HEADER_BYTES + itemsize * (unit.stop - unit.start - (unit.own.stop - unit.own.start))
                for unit in self.shards.units if unit.start in self.parts}
