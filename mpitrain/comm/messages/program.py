"""From an algorithm's rounds to what one rank does: messages over bytes, array operations, and lanes that overlap.

    rounds over elements  ->  stages (plain, or packed: see packing.py)  ->  lanes of segments  ->  messages over bytes

A lane does the same stages for some segments of every slice. Lanes share nothing, so one adds what arrived while the others'
messages travel. That changes the timing and never the bits: every element is added in the same order as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpitrain.schedules.steps import Algorithm, Copy, Receive, Reduce, Round, Send, Slice

MESSAGE_BYTES = 1 << 30        # longer messages are split: MPI 3 counts in 32 bits
LANES = 8                      # lanes side by side; each has a tag of its own, of at least 128
MOST_RANKS_IN_LANES = 64       # with more, parts are short, and the check for lanes reads all ranks' rounds
ALIGNMENT = 64                 # segments begin at multiples of so many elements from the start of their slice


class Part(NamedTuple):
    """Elements [start, stop) of a buffer: "data", "inbox", or the packed values beside them, "data16" and "inbox16"."""

    buffer: str
    start: int
    stop: int


class Operation(NamedTuple):
    """An array operation over parts; `StepsWork._compute` runs it by `name`."""

    name: str
    parts: tuple[Part, ...]


class Stage(NamedTuple):
    """One round: operations, then messages as (part, peer) all in flight together, then operations."""

    before: tuple[Operation, ...]
    receives: tuple[tuple[Part, int], ...]
    sends: tuple[tuple[Part, int], ...]
    after: tuple[Operation, ...]


class Messages(NamedTuple):
    """A stage whose messages are (buffer, first byte, last byte + 1, peer)."""

    before: tuple[Operation, ...]
    receives: tuple[tuple[str, int, int, int], ...]
    sends: tuple[tuple[str, int, int, int], ...]
    after: tuple[Operation, ...]


def plain(rounds: Iterable[Round]) -> list[Stage]:
    """Stages that send the arrays' own numbers; rounds in which this rank does nothing are left out."""
    return [Stage((), tuple((part_of(step.into), step.peer) for step in round_ if isinstance(step, Receive)),
                  tuple((part_of(step.what), step.peer) for step in round_ if isinstance(step, Send)),
                  tuple(operation(step) for step in round_ if isinstance(step, (Reduce, Copy))))
            for round_ in rounds if round_]


def operation(step: Reduce | Copy) -> Operation:
    if isinstance(step, Reduce):
        return Operation("sum", (part_of(step.left), part_of(step.right), part_of(step.into)))
    return Operation("copy", (part_of(step.what), part_of(step.into)))


def part_of(what: Slice) -> Part:
    return Part(what.buffer, what.start, what.stop)


def translate(stages: Iterable[Stage], sizes: dict[str, int], message_bytes: int = MESSAGE_BYTES) -> list[Messages]:
    """Messages over bytes, long ones split; `sizes` is the bytes of an element by buffer."""
    def split(messages: Iterable[tuple[Part, int]]) -> tuple[tuple[str, int, int, int], ...]:
        return tuple((part.buffer, start, min(start + message_bytes, part.stop * sizes[part.buffer]), peer)
                     for part, peer in messages
                     for start in range(part.start * sizes[part.buffer], part.stop * sizes[part.buffer], message_bytes))
    return [Messages(stage.before, split(stage.receives), split(stage.sends), stage.after) for stage in stages]


def lanes(stages: Sequence[Stage], count: int) -> list[list[Stage]]:
    """The stages for each of `count` segments, as at most LANES programs that run side by side: program i does segments
    i, i + LANES, ... one after the other, in an inbox of its own."""
    if count == 1:
        return [list(stages)]
    width = min(count, LANES)
    longest: dict[int, int] = {}                              # inbox slices that begin at one place share their memory
    for part in parts_of(stages):
        if part.buffer.startswith("inbox"):
            longest[part.start] = max(longest.get(part.start, 0), part.stop - part.start)
    offsets, total = {}, 0
    for start, length in sorted(longest.items()):
        offsets[start] = total
        total += -(-length // count) + ALIGNMENT

    def segment(part: Part, index: int) -> Part:
        start, stop = (bound(part.stop - part.start, i, count) for i in (index, index + 1))
        if part.buffer.startswith("inbox"):
            begin = index % width * total + offsets[part.start]
            return Part(part.buffer, begin, begin + stop - start)
        return Part(part.buffer, part.start + start, part.start + stop)

    def cut(operations: tuple[Operation, ...], index: int) -> tuple[Operation, ...]:
        return tuple(Operation(name, tuple(segment(part, index) for part in parts)) for name, parts in operations)

    def move(messages: tuple[tuple[Part, int], ...], index: int) -> tuple[tuple[Part, int], ...]:
        return tuple((segment(part, index), peer) for part, peer in messages)

    return [[Stage(cut(stage.before, index), move(stage.receives, index), move(stage.sends, index), cut(stage.after, index))
             for index in range(lane, count, width) for stage in stages] for lane in range(width)]


def bound(length: int, index: int, count: int) -> int:
    """The first element of segment `index` of `count` in a slice of `length` elements."""
    return length if index == count else length * index // count // ALIGNMENT * ALIGNMENT


def may_be_cut(programs: Iterable[Sequence[Stage]]) -> bool:
    """Whether a segment of each slice meets the same segment of others only: on every rank, slices of the data are equal or
    apart, and those of the inbox are read as they were written, or are apart."""
    return all(_apart({part for part in parts_of(stages) if part.buffer == "data"})
               and _apart(_longest(part for part in parts_of(stages) if part.buffer == "inbox"))
               and _read_as_written(stages) for stages in programs)


def segment_count(algorithm: Algorithm, n: int, length: int, itemsize: int, segment_bytes: int) -> int:
    """The number of segments of about `segment_bytes` in a part of the array. Every rank finds the same."""
    count = length * itemsize // n // segment_bytes
    if count < 2 or n > MOST_RANKS_IN_LANES:
        return 1
    return count if may_be_cut(plain(algorithm(rank, n, length)) for rank in range(n)) else 1


def parts_of(stages: Iterable[Stage]) -> list[Part]:
    """Every part that the stages touch."""
    return [part for stage in stages
            for part in (*(part for operation in (*stage.before, *stage.after) for part in operation.parts),
                         *(part for part, _ in (*stage.receives, *stage.sends)))]


def needed(programs: Iterable[Sequence[Stage]], buffer: str) -> int:
    """The number of elements of a buffer that the stages touch, from its beginning on."""
    return max((part.stop for stages in programs for part in parts_of(stages) if part.buffer == buffer), default=0)


def _read_as_written(stages: Iterable[Stage]) -> bool:
    written: dict[int, Part] = {}
    for stage in stages:
        written.update({part.start: part for part, _ in stage.receives if part.buffer == "inbox"})
        for operation in stage.after:
            *read, into = operation.parts
            if any(part.buffer == "inbox" and written.get(part.start) != part for part in read):
                return False
            written.update({into.start: into} if into.buffer == "inbox" else {})
        if any(part.buffer == "inbox" and written.get(part.start) != part for part, _ in stage.sends):
            return False
    return True


def _longest(parts: Iterable[Part]) -> set[Part]:
    longest: dict[int, Part] = {}
    for part in parts:
        if part.start not in longest or part.stop > longest[part.start].stop:
            longest[part.start] = part
    return set(longest.values())


def _apart(parts: set[Part]) -> bool:
    ordered = sorted(part for part in parts if part.start < part.stop)
    return all(left.stop <= right.start for left, right in zip(ordered, ordered[1:]))
