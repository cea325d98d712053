"""Functions of one and two numbers that NumPy computes number by number, or in several passes over memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, packed, suits_c


def _alike(x: Any, y: Any) -> bool:
    return type(x) is type(y) is np.ndarray and suits_c(x) and x.dtype == y.dtype and x.shape == y.shape


def _of_two(name: str, function: str, ufunc: str, *options: int) -> Kernel:
    """A function of NumPy's that C computes where both arrays have one shape and dtype."""
    def reference(x: Any, y: Any) -> Array:
        return getattr(array_module(x), ufunc)(x, y)

    @host("elementwise", function, "X:n X:n X!:n " + "i " * len(options) + "in")
    def run(call: CFunction, x: Any, y: Any) -> Array:
        if not _alike(x, y):
            return reference(x, y)
        result = np.empty(x.shape, x.dtype)
        call(packed(x), packed(y), result, *options, x.size)
        return result
    return Kernel(name, reference, run, run.loop("elementwise"))


remainder = _of_two("remainder", "remainder", "remainder", 1)
fmod = _of_two("fmod", "remainder", "fmod", 0)
logaddexp = _of_two("logaddexp", "logaddexp", "logaddexp")


def _replace(x: Array, missing: float, most: float, least: float) -> Array:
    where, kind = array_module(x).where, x.dtype.type
    return where(x != x, kind(missing), where(x == math.inf, kind(most), where(x == -math.inf, kind(least), x)))


@host("elementwise", "replace", "X:n X!:n d d d in")
def _replace_host(call: CFunction, x: Array, missing: float, most: float, least: float) -> Array:
    if not suits_c(x):
        return _replace(x, missing, most, least)
    result = np.empty(x.shape, x.dtype)
    call(packed(x), result, missing, most, least, x.size)
    return result


replace = Kernel("replace", _replace, _replace_host, _replace_host.loop("elementwise"))
"""x with these numbers in place of NaN and the infinities."""
