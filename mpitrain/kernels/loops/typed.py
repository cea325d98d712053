"""Loops for the dtype of their first array, compiled at the first call with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpitrain.kernels.kernel import Function, compiled

NAMES = {"f": "float32", "d": "float64"}


def array(dtype: str, written: bool) -> str:
    """The type of a flat array without gaps; one that is only read may be read-only."""
    return f"{dtype}[::1]" if written else f"Array({dtype}, 1, 'C', True)"


def loop(arguments: str) -> Callable[[Function], Function]:
    """Numba's version of a function of flat arrays; `arguments` has a word for each of its arguments.

    x is an array of the dtype that is read, y one that is written, t one number of it; i an int64, d a float64; and arrays of
    others, read or written: int32 (int32+), int64, uint8, uint16, uint32, uint64, float64. What comes back takes arrays of any
    shape without gaps.
    """
    words = arguments.split()

    def decorate(function: Function) -> Function:
        @cache
        def version(kind: str) -> Function:
            t = NAMES[kind]
            types = {"x": array(t, False), "y": array(t, True), "t": t, "i": "int64", "d": "float64"}
            return compiled(f"void({', '.join(types.get(w) or array(w.rstrip('+'), w.endswith('+')) for w in words)})")(function)

        places = [i for i, word in enumerate(words) if word not in ("t", "i", "d")]

        def call(*given: Any) -> None:
            flat = list(given)
            for i in places:
                flat[i] = given[i].reshape(-1)
            version(given[first].dtype.char)(*flat)
        first = next(i for i, word in enumerate(words) if word in ("x", "y"))
        return call
    return decorate


def flat(array: Any) -> Any:
    """The array without gaps, and of one dim."""
    return np.ascontiguousarray(array).reshape(-1)
