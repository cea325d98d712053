"""Packed stages of an array that lies on a device: values cross the bus packed too, wherever nothing else counts.

    host      round data -> data16; send data16    ...   add inbox16 to data, round -> data16   receive, unpack data16 -> data
    device    unpack data16 -> data; send data16   ...   add inbox16 to data, pack -> data16    receive

A part whose first use is to be packed comes down as the device has packed it, to its place beside the data; a part that others
are added to first comes down in float32, since rounding it would change the sum. A result that all ranks round lies beside the
data in the end, and goes up from there. So the bits are those of the host's stages, which also unpack and pack more often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.backend.runtime import runtime
from mpitrain.comm.messages.program import Operation, Stage, parts_of
from mpitrain.kernels.wire import Format
from mpitrain.schedules.steps import Slice

Bounds: TypeAlias = tuple[int, int]                           # elements [start, stop)


def device_packs(array: Array, packing: Format) -> bool:
    """Whether the array's device has kernels that pack its numbers so."""
    module = array_module(array)
    device = None if module is np or array.dtype.name != "float32" else runtime(module.__name__)
    return device is not None and device.function("wire", f"pack_{packing.name}") is not None


class Crossing(NamedTuple):
    """What goes over the bus: the parts that come down packed, those that come down in float32, and those that go up."""

    packed: tuple[Bounds, ...]
    wide: tuple[Bounds, ...]
    up: tuple[Bounds, ...]
    up_packed: bool


class Pieces:
    """The data, cut wherever a slice of it begins or ends: no slice has a part of a piece."""

    def __init__(self, slices: Iterable[Slice]):
        self.bounds = sorted({bound for part in slices if part.buffer == "data" for bound in (part.start, part.stop)})
        self.number = max(len(self.bounds) - 1, 0)

    def of(self, *parts: Slice) -> list[int]:
        """The pieces of the data that lie in these slices; there are none in other buffers."""
        return [piece for part in parts if part.buffer == "data"
                for piece in range(bisect_left(self.bounds, part.start), bisect_left(self.bounds, part.stop))]

    def runs(self, chosen: Callable[[int], bool]) -> tuple[Bounds, ...]:
        """The elements of the chosen pieces, neighbours joined."""
        found: list[Bounds] = []
        for piece in filter(chosen, range(self.number)):
            start, stop = self.bounds[piece:piece + 2]
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return tuple(found)


def across_the_bus(stages: Sequence[Stage], results: Sequence[Bounds], on_all_ranks: bool) -> tuple[list[Stage], Crossing]:
    """Stages of `packing.packed` for the values that come down as the `Crossing` says, and leave from where it says.

    Packed values lie beside the whole data: the stages must not be `compacted`.
    """
    whole = [Slice("data", *bounds) for bounds in results]
    pieces = Pieces([*parts_of(stages), *whole])
    stages, packed, wide = _first_uses(stages, pieces)
    if on_all_ranks:
        stages = _without_results(stages, pieces)
    return stages, Crossing(pieces.runs(packed.__contains__), pieces.runs(wide.__contains__), tuple(results), on_all_ranks)


def reads_and_writes(operation: Operation) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """The slices that an operation reads, and those that it writes."""
    name, parts = operation
    if name in ("add", "add_pack", "add_round"):              # packed + x: into x, into what is packed, or both
        return parts[:2], parts[2 if name == "add_pack" else 1:]
    return parts[:-1], parts if name == "round" else parts[-1:]


def _first_uses(stages: Sequence[Stage], pieces: Pieces) -> tuple[list[Stage], set[int], set[int]]:
    """The stages without packing what comes down packed, the pieces that do, and those that come down in float32."""
    packed: set[int] = set()
    wide: set[int] = set()
    known: set[int] = set()                                   # these two, and what has been written: all that may be read
    arrived: set[int] = set()                                 # packed values of another rank lie beside these

    def changed(operation: Operation) -> list[Operation]:
        first, last = operation.parts[0], operation.parts[-1]
        if operation.name in ("pack", "round") and first.buffer == "data" and (known | arrived).isdisjoint(pieces.of(first)):
            packed.update(pieces.of(first))
            known.update(packed)
            return [Operation("unpack", (last, first))] if operation.name == "round" else []
        read, written = (set(pieces.of(*parts)) for parts in reads_and_writes(operation))
        wide.update(read - known)
        known.update(read | written)
        return [operation]

    found = []
    for stage in stages:
        arrived.update(pieces.of(*(part._replace(buffer="data") for part, _ in stage.receives if part.buffer == "data16")))
        before, after = ([new for old in those for new in changed(old)] for those in (stage.before, stage.after))
        found.append(stage._replace(before=tuple(before), after=tuple(after)))
    return found, packed, wide


def _without_results(stages: Sequence[Stage], pieces: Pieces) -> list[Stage]:
    """The stages without what they write to the data and never read: the results lie beside it."""
    read: set[int] = set()                                    # by what comes later

    def changed(operation: Operation) -> list[Operation]:
        name, parts = operation
        lost = all(part.buffer == "data" and read.isdisjoint(pieces.of(part)) for part in _written_in_float32(operation))
        if lost and name == "unpack":
            return []
        if lost and name in ("round", "add_round"):
            operation = Operation(name.replace("round", "pack"), parts)
        reads, writes = (set(pieces.of(*those)) for those in reads_and_writes(operation))
        read.difference_update(writes)
        read.update(reads)
        return [operation]

    found = []
    for stage in reversed(stages):
        after, before = ([new for old in reversed(those) for new in changed(old)] for those in (stage.after, stage.before))
        found.append(stage._replace(before=tuple(reversed(before)), after=tuple(reversed(after))))
    return found[::-1]


def _written_in_float32(operation: Operation) -> list[Slice]:
    return [part for part in reads_and_writes(operation)[1] if not part.buffer.endswith("16")]
