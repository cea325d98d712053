"""Numbers of a bounded size as integers modulo 2^32, whose sums are exact in any order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, NumericsError

HALF = 1 << 31                 # sums lie between -HALF and HALF
SLACK = 1e-5                   # a norm in float32 that is clipped to C may be above it by so much of it
LEAST_SCALE_BITS = 8           # steps of a 256th of the clip: with coarser ones, rounding is what is summed
Words = np.ndarray[Any, np.dtype[np.uint32]]


class FixedPoint:
    """Sums of `count` vectors whose elements are `clip` at most, in steps of 1 / `scale`, a power of two.

    ConfigError where count clip scale is not below 2^31; without `scale` the largest that is, but for a clip and a count with
    which that would be coarse.
    """

    def __init__(self, clip: float, count: int, scale: float | None = None):
        self.clip, self.count = clip, count
        room = HALF / (count * (1 + SLACK)) - 1               # for each vector; half a step of it may be rounding
        best = 2.0 ** math.floor(math.log2(room / clip)) if 0 < room < clip * 1e300 else 0.0
        self.scale = best if scale is None else scale
        if self.scale > best or not clip * best >= 1 << LEAST_SCALE_BITS:
            found = f"{count} * {clip:g} * {self.scale:g}" if scale else f"{count} * {clip:g}, in steps of a 256th of the clip,"
            raise ConfigError(f"the secure sum adds up integers below 2^31, and clients * privacy.clip * scale = {found} does "
                              f"not fit; at most {int(HALF / (1 << LEAST_SCALE_BITS))} clients can be in a round")

    def encode(self, values: Any) -> Words:
        """Values rounded to steps, a negative one as 2^32 less its size. NumericsError for one beyond the clip, or NaN."""
        scaled = np.asarray(values, np.float64) * self.scale
        if not (np.abs(scaled) <= self.clip * (1 + SLACK) * self.scale).all():
            raise NumericsError(f"a value of a secure sum is not finite, or beyond privacy.clip = {self.clip:g}")
        return np.rint(scaled).astype(np.int64).astype(np.uint32)

    def decode(self, total: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The sum of at most `count` encoded vectors as numbers: exact."""
        signed: np.ndarray[Any, np.dtype[np.float64]] = total.view(np.int32).astype(np.float64)
        return signed / self.scale
