"""What the ranks put into a measured sum: other values at every turn, and their float64 sum without a message.

Rank r brings base * scale + shift at turn t, where `base` is the same random array everywhere and the two numbers follow from
(r, t). So every rank knows the sum, base * (sum of the scales) + (sum of the shifts), at the cost of one pass whatever the number
of ranks; and a result that is stale, lacks a rank, counts one twice or lies at the wrong place is far from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.errors import MpitrainError

BLOCK = 1 << 15                    # Float64 copies of so many elements stay in a core's cache.
WIRES = {None: (0.0, 0.0), "bfloat16": (2.0**-7, 0.0), "float16": (2.0**-10, 2.0**-24)}     # eps; least step
GOLDEN = 0.6180339887498949        # The golden ratio's multiples, modulo 1, are spread evenly.


class Inputs:
    """The values of arrays of `length` elements on `ranks` ranks."""

    def __init__(self, length: int, dtype: str, ranks: int):
        self.length, self.dtype, self.ranks = length, np.dtype(dtype), ranks
        self._base = np.random.default_rng(length).standard_normal(length, dtype="float32").astype(self.dtype)

    def fill(self, out: np.ndarray[Any, Any], rank: int, turn: int) -> None:
        """Writes what `rank` brings at `turn`, or the first part of it."""
        scale, shift = self._numbers(rank, turn)
        np.multiply(self._base[:out.size], scale, out=out)
        out += shift

    def _numbers(self, rank: int, turn: int) -> tuple[Any, Any]:
        """(scale, shift) of one rank at one turn, in [0.5, 1.5) and [-0.5, 0.5), as the arrays' type has them."""
        place = turn * 4099 + rank + 1
        return self.dtype.type(0.5 + place * GOLDEN % 1.0), self.dtype.type(place * (1.0 - GOLDEN) * 7.0 % 1.0 - 0.5)

    def expected(self, turn: int, start: int, stop: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(sum over ranks, sum of the magnitudes) of elements start:stop, in float64."""
        each = [tuple(map(float, self._numbers(rank, turn))) for rank in range(self.ranks)]
        scales, shifts = sum(scale for scale, _ in each), sum(shift for _, shift in each)
        base = self._base[start:stop].astype(np.float64)
        return base * scales + shifts, np.abs(base) * scales + sum(abs(shift) for _, shift in each)

    def check(self, found: np.ndarray[Any, Any], turn: int, label: str, wire: str | None = None) -> None:
        """MpitrainError at the first element that is further from the float64 sum than rounding can bring it.

        Whatever the order of n - 1 additions, each rounds by at most eps / 2 of a partial sum, and no partial sum exceeds the
        sum of the magnitudes; the values themselves are rounded twice. (n + 1) / 2 eps in all, and as much again for safety.
        Where messages hold numbers of another type (`wire`), each of n - 1 partial sums and the result are rounded to that, too.
        """
        eps, smallest = WIRES[wire]
        step = (self.ranks + 1) * (float(np.finfo(self.dtype).eps) + eps)
        for start in range(0, self.length, BLOCK):
            stop = min(start + BLOCK, self.length)
            total, magnitude = self.expected(turn, start, stop)
            wrong = ~(np.abs(found[start:stop] - total) <= step * magnitude + self.ranks * smallest)     # NaN is wrong as well.
            if wrong.any():
                i = int(wrong.argmax())
                raise MpitrainError(f"{label} gave a wrong sum: element {start + i} of {self.length} is "
                                    f"{float(found[start + i])!r}, in float64 the ranks' values add up to {float(total[i])!r}; "
                                    f"this algorithm must not be used")
