"""Slices of a bucket, of about equal size, one for each rank, cut where every layout may cut.

Norms add up squares in blocks of 4,096 elements counted from the start of each parameter (`optim.norm`). A slice that begins
and ends at such a block, or at a parameter's bounds, sums whole blocks, so any number of ranks finds the same bits. An
optimizer that needs norms of whole parameters (LARS, LAMB) gets slices of whole parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mpitrain.kernels.optimizer import NORM_BLOCK
from mpitrain.optim import Segment


@dataclass(frozen=True)
class Part:
    """A part of a parameter, elements [start, stop) of a flat array, as `optim.Segment` wants it; it begins at the parameter's
    element number `first`."""

    parameter: Any
    name: str
    start: int
    stop: int
    decay: bool
    first: int = 0


def cut_slices(segments: Sequence[Segment], start: int, stop: int, n: int, *, whole: bool,
               lengths: Sequence[float] | None = None) -> list[slice]:
    """Cuts [start, stop), whose ends are bounds of parameters, into n slices in order, some empty; see above for the cuts.

    `lengths` are the wanted lengths (default: equal ones), which add up to that of all.
    """
    inside = [s for s in segments if start <= s.start and s.stop <= stop]
    within = [cut for s in inside for cut in range(s.start, s.start + 1 if whole else s.stop, NORM_BLOCK)]
    allowed = sorted({start, stop, *within})
    cuts = [start]
    wanted = list(accumulate(lengths)) if lengths is not None else []
    for i in range(1, n):
        ideal = start + (int(wanted[i - 1]) if wanted else (stop - start) * i // n)
        after = bisect_left(allowed, ideal)
        near = min(allowed[max(0, after - 1):after + 1], key=lambda cut: abs(cut - ideal))
        cuts.append(max(cuts[-1], near))
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], stop])]


def parts_of(segments: Sequence[Segment], own: slice) -> list[Part]:
    """The parts of parameters in a slice, in its order."""
    return [Part(s.parameter, s.name, max(s.start, own.start), min(s.stop, own.stop), s.decay, max(0, own.start - s.start))
            for s in segments if max(s.start, own.start) < min(s.stop, own.stop)]
