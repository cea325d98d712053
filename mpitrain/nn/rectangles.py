"""Ranges of elements of an array, in the order in which they lie, as runs of another array that has it, and as boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpitrain.nn.init import Shape


def runs(offset: Shape, shape: Shape, whole: Shape, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(first global element, count) of the contiguous pieces that elements start..stop of a part consist of.

    All dims after `inner` are whole, so a run is the product of the dims from there.
    """
    inner = max(0, len(shape) - 1)
    while inner > 0 and shape[inner] == whole[inner]:
        inner -= 1
    run = max(1, math.prod(shape[inner:]))
    strides = [math.prod(whole[d + 1:]) for d in range(len(whole))]
    while start < stop:
        count = min(stop, (start // run + 1) * run) - start
        index = np.unravel_index(start, shape) if shape else ()
        yield sum((int(i) + o) * s for i, o, s in zip(index, offset, strides)), count
        start += count


def rectangles(shape: Shape, start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """Elements start .. stop of an array (C order) as boxes [low, high), in order: the fewest, at most 2 n - 1 for n dims."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    found: list[tuple[Shape, Shape]] = []
    while start < stop:
        row, offset = divmod(start, inner)
        rows = (stop - start) // inner if offset == 0 else 0
        if rows:
            found.append(((row, *(0 for _ in shape[1:])), (row + rows, *shape[1:])))
            start += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            found += [((row, *low), (row + 1, *high)) for low, high in rectangles(shape[1:], offset, offset + end - start)]
            start = end
    return found
