"""From an algorithm's rounds to what one rank does: messages over bytes, and array operations.

    rounds over elements  ->  stages (plain, or packed: see packing.py)  ->  messages over bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, Send, Slice

MESSAGE_BYTES = 1 << 30        # longer messages are split: MPI 3 counts in 32 bits


class Operation(NamedTuple):
    """An array operation over slices; `StepsWork._compute` runs it by `name`."""

    name: str
    parts: tuple[Slice, ...]


class Stage(NamedTuple):
    """One round: operations, then messages as (slice, peer) all in flight together, then operations."""

    before: tuple[Operation, ...]
    receives: tuple[tuple[Slice, int], ...]
    sends: tuple[tuple[Slice, int], ...]
    after: tuple[Operation, ...]


class Messages(NamedTuple):
    """A stage whose messages are (buffer, first byte, last byte + 1, peer)."""

    before: tuple[Operation, ...]
    receives: tuple[tuple[str, int, int, int], ...]
    sends: tuple[tuple[str, int, int, int], ...]
    after: tuple[Operation, ...]


def plain(rounds: Iterable[Round]) -> list[Stage]:
    """Stages that send the arrays' own numbers; rounds in which this rank does nothing are left out."""
    return [Stage((), tuple((step.into, step.peer) for step in round_ if isinstance(step, Receive)),
                  tuple((step.what, step.peer) for step in round_ if isinstance(step, Send)),
                  tuple(Operation("sum" if isinstance(step, Reduce) else "copy", tuple(step))
                        for step in round_ if isinstance(step, (Reduce, Copy))))
            for round_ in rounds if round_]


def translate(stages: Iterable[Stage], sizes: dict[str, int], message_bytes: int = MESSAGE_BYTES) -> list[Messages]:
    """Messages over bytes, long ones split; `sizes` is the bytes of an element by buffer."""
    def split(messages: Iterable[tuple[Slice, int]]) -> tuple[tuple[str, int, int, int], ...]:
        return tuple((part.buffer, start, min(start + message_bytes, part.stop * sizes[part.buffer]), peer)
                     for part, peer in messages
                     for start in range(part.start * sizes[part.buffer], part.stop * sizes[part.buffer], message_bytes))
    return [Messages(stage.before, split(stage.receives), split(stage.sends), stage.after) for stage in stages]


def parts_of(stages: Iterable[Stage]) -> list[Slice]:
    """Every slice that the stages touch."""
    return [part for stage in stages
            for part in (*(part for operation in (*stage.before, *stage.after) for part in operation.parts),
                         *(part for part, _ in (*stage.receives, *stage.sends)))]


def needed(stages: Iterable[Stage], buffer: str) -> int:
    """The number of elements of a buffer that the stages touch, from its beginning on."""
    return max((part.stop for part in parts_of(stages) if part.buffer == buffer), default=0)
