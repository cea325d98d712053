"""The parts of parameters in a part of a flat array, as compressors see them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from mpitrain.nn import Segment
from mpitrain.parallel.compress.compressor import Piece

PADDING = "padding"                                           # the name of what lies between parameters


def pieces_of(segments: Sequence[Segment], start: int, stop: int) -> list[Piece]:
    """The parts of parameters in elements [start, stop) of a flat array, whose positions count from `start`. The zeros between
    two parameters are a piece of their own, so that they are in no block of numbers."""
    found: list[Piece] = []
    for segment in overlapping(segments, start, stop):
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            at = found[-1].stop if found else 0
            if gap := low - start - at:
                found.append(Piece(PADDING, at, at + gap, 0, (gap,)))
            found.append(Piece(segment.name, low - start, high - start, low - segment.start, tuple(segment.shape)))
    return found


def overlapping(segments: Sequence[Segment], start: int, stop: int) -> Sequence[Segment]:
    """Those of `segments`, in order, that may have elements in [start, stop)."""
    starts = [segment.start for segment in segments]
    return segments[max(0, bisect_right(starts, start) - 1):bisect_left(starts, stop)]
