"""What one rank does in the exchange of a compressed array: one collective, whose rounds encode, send, decode.

    packed      encode all parts | each to its owner | owner: decode, add, round | to everyone | decode all
    linear      encode | all-reduce of a short array | decode, encode | all-reduce of the next one | decode
    gathered    encode | all-gather of equal parts | decode all

The rounds are those of a `StepsWork`: messages over bytes of named buffers, and what is done before and after them. What a
compressor does stands among them as a function of these buffers (`Deed`). So all phases are one collective, with one header and
one tag, and ranks that start the same buckets in the same order cannot mix up their phases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.comm.messages.program import MESSAGE_BYTES, Messages, Stage, needed, plain, translate
from mpitrain.parallel.compress.compressor import OWNER, Compressor, Gathered, Linear, Packed, State
from mpitrain.schedules.direct import direct_all_gather
from mpitrain.schedules.steps import Algorithm, Slice

Memory: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
Deed: TypeAlias = Callable[[Memory], None]
VALUES, WIRE, ARRIVED = "values", "wire", "arrived"          # buffers of float32, of bytes to send, and of bytes received
SUMS, INBOX = "data", "inbox"                                # buffers of float32, as the steps of an all-reduce call theirs


class Program(NamedTuple):
    """Rounds, in which functions of the buffers stand among array operations, and the bytes of the buffers beside the values."""

    rounds: list[Messages]
    nbytes: dict[str, int]

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, without the header of the collective."""
        return sum(stop - start for round_ in self.rounds for _, start, stop, _ in round_.sends)


def program_of(compressor: Compressor, rank: int, algorithm: Callable[[int], Algorithm], state: State, step: Callable[[], int],
               message_bytes: int = MESSAGE_BYTES) -> Program:
    """The program of rank `rank` of `compressor.n`; `algorithm(words)` is the all-reduce of a linear compressor's messages,
    `step()` the number of the step."""
    if isinstance(compressor, Packed):
        return packed(compressor, rank, state, step, message_bytes)
    if isinstance(compressor, Linear):
        return linear(compressor, rank, algorithm, state, step, message_bytes)
    assert isinstance(compressor, Gathered)
    return gathered(compressor, rank, state, step, message_bytes)


def packed(c: Packed, rank: int, state: State, step: Callable[[], int], message_bytes: int = MESSAGE_BYTES) -> Program:
    """Rank i owns a run of blocks. It adds all contributions in float32, in the ranks' order and its own as it would have been
    sent, into its part of the values, which are encoded by then."""
    blocks = cut_evenly(c.bounds.tolist(), c.n)
    parts = list(pairwise(blocks))
    sizes = [c.nbytes(first, stop) if stop > first else 0 for first, stop in parts]
    places = [0, *accumulate(sizes)]
    wire = [Slice(WIRE, start, stop) for start, stop in pairwise(places)]
    elements = [slice(int(c.bounds[first]), int(c.bounds[stop])) for first, stop in parts]
    others = [(rank + hop) % c.n for hop in range(1, c.n)]
    own, (first, stop) = elements[rank], parts[rank]
    slots = {peer: Slice(ARRIVED, sizes[rank] * i, sizes[rank] * (i + 1)) for i, peer in enumerate(sorted(others))} \
        | {rank: wire[rank]}
    error, of_sums = state.get("error"), state.get("sum_error")

    def encode(memory: Memory) -> None:
        for i in (*others, rank):
            if sizes[i]:
                c.encode(step(), rank, memory[VALUES][elements[i]], None if error is None else error[elements[i]], *parts[i],
                         seen(memory, wire[i]))

    def add_up(memory: Memory) -> None:
        total = memory[VALUES][own]
        for worker in range(c.n):
            c.decode(seen(memory, slots[worker]), first, stop, total, worker > 0)
        c.encode(step(), OWNER, total, None if of_sums is None else of_sums[own], first, stop, seen(memory, wire[rank]))

    def decode(memory: Memory) -> None:
        for i in range(c.n):
            if sizes[i]:
                c.decode(seen(memory, wire[i]), *parts[i], memory[VALUES][elements[i]], False)

    to_owners = Stage((), tuple((slots[peer], peer) for peer in reversed(others) if sizes[rank]),
                      tuple((wire[peer], peer) for peer in others if sizes[peer]), ())
    from_owners = Stage((), tuple((wire[peer], peer) for peer in reversed(others) if sizes[peer]),
                        tuple((wire[rank], peer) for peer in others if sizes[rank]), ())
    rounds = [*framed(rounds_of([to_owners], 1, message_bytes), encode, *([add_up] if sizes[rank] else [])),
              *framed(rounds_of([from_owners], 1, message_bytes), None, decode)]
    return Program(rounds, {WIRE: places[-1], ARRIVED: sizes[rank] * (c.n - 1)})


def linear(c: Linear, rank: int, algorithm: Callable[[int], Algorithm], state: State, step: Callable[[], int],
           message_bytes: int = MESSAGE_BYTES) -> Program:
    """One all-reduce after the other, all in the same buffers."""
    rounds: list[Messages] = []
    lengths = {SUMS: 0, INBOX: 0}
    for phase in range(c.phases):
        words = c.words(phase)

        def encode(memory: Memory, phase: int = phase, words: int = words) -> None:
            c.encode(phase, step(), memory[VALUES], state, memory[SUMS][:words])

        def decode(memory: Memory, phase: int = phase, words: int = words) -> None:
            c.decode(phase, step(), memory[SUMS][:words], state, memory[VALUES])

        stages = plain(algorithm(words)(rank, c.n, words)) if words else []
        lengths = {buffer: max(length, needed(stages, buffer)) for buffer, length in lengths.items()}
        lengths[SUMS] = max(lengths[SUMS], words)
        rounds += framed(rounds_of(stages, 4, message_bytes), encode, decode)
    return Program(rounds, {buffer: 4 * length for buffer, length in lengths.items()})


def gathered(c: Gathered, rank: int, state: State, step: Callable[[], int], message_bytes: int = MESSAGE_BYTES) -> Program:
    size = c.nbytes()

    def encode(memory: Memory) -> None:
        c.encode(step(), memory[VALUES], state, memory[WIRE][rank * size:(rank + 1) * size])

    def decode(memory: Memory) -> None:
        c.decode(step(), memory[WIRE][:c.n * size].reshape(c.n, size), memory[VALUES])

    stages = [stage._replace(receives=tuple((part._replace(buffer=WIRE), peer) for part, peer in stage.receives),
                             sends=tuple((part._replace(buffer=WIRE), peer) for part, peer in stage.sends))
              for stage in plain(direct_all_gather(rank, c.n, c.n * size))]
    return Program(framed(rounds_of(stages, 1, message_bytes), encode, decode), {WIRE: c.n * size})


def owned(c: Compressor, rank: int) -> tuple[int, int]:
    """The elements [start, stop) whose sum rank `rank` rounds for everyone; none but of packed ones."""
    if not isinstance(c, Packed):
        return 0, 0
    blocks = cut_evenly(c.bounds.tolist(), c.n)
    return int(c.bounds[blocks[rank]]), int(c.bounds[blocks[rank + 1]])


def seen(memory: Memory, part: Slice) -> np.ndarray[Any, Any]:
    return memory[part.buffer][part.start:part.stop]


def framed(rounds: Sequence[Messages], before: Deed | None, *after: Deed) -> list[Messages]:
    """The rounds with a function before the first of them, and others after the last one, where there are any rounds or not."""
    found: list[Any] = list(rounds) or [Messages((), (), (), ())]
    if before is not None:
        found[0] = found[0]._replace(before=(before, *found[0].before))
    found[-1] = found[-1]._replace(after=(*found[-1].after, *after))
    return found


def cut_evenly(bounds: Sequence[int], n: int) -> list[int]:
    """n + 1 indices into `bounds`, positions in order, that cut what they span into n almost equal parts; some may be empty."""
    low, high, last = bounds[0], bounds[-1], len(bounds) - 1
    found = [0]
    for i in range(1, n):
        wanted = low + i * (high - low) / n
        index = min(bisect_left(bounds, wanted), last)
        if index > 0 and wanted - bounds[index - 1] < bounds[index] - wanted:
            index -= 1
        found.append(max(index, found[-1]))
    return [*found, last]


def rounds_of(stages: Sequence[Stage], itemsize: int, message_bytes: int) -> list[Messages]:
    return translate(stages, dict.fromkeys((SUMS, INBOX, WIRE, ARRIVED), itemsize), message_bytes)
