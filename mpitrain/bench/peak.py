"""What one core's arithmetic can do at most, measured: the ceiling that a training step is held against."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from mpitrain.backend import native

AT_ONCE = 0.002                   # Seconds of a try; some of the short tries fall between two interruptions.
TRIES = 25
SIDE = 768                        # The side of matrices without a compiler; larger ones were no faster with OpenBLAS.


def peak_flops(dtype: str = "float32") -> float:
    """Floating-point operations in a second, the best of some tries, on the calling thread's core; a multiply-add is two.

    A loop of nothing but multiply-adds in the widest vectors; without a compiler, the best matrix product (and its threads).
    """
    run = multiply_adds(dtype) or matrix_product(dtype)
    work = 1
    while _seconds(run, work)[0] < AT_ONCE:
        work *= 2
    tries = [_seconds(run, work) for _ in range(TRIES)]
    return max(flops / seconds for seconds, flops in tries)


def _seconds(run: Callable[[int], int], work: int) -> tuple[float, int]:
    began = time.perf_counter()
    flops = run(work)
    return time.perf_counter() - began, flops


def multiply_adds(dtype: str) -> Callable[[int], int] | None:
    """Runs so many thousand rounds in C and gives the operations done; None without a compiler."""
    library = native.load("peak")
    if library is None:
        return None
    function = getattr(library, f"peak_{dtype}")
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    values = np.zeros(16, dtype)
    return lambda thousands: int(function(values.ctypes.data, 1000 * thousands))


def matrix_product(dtype: str) -> Callable[[int], int]:
    """Runs so many products of square matrices and gives the operations done."""
    a, b, c = (np.full((SIDE, SIDE), value, dtype) for value in (0.5, 0.25, 0.0))

    def run(products: int) -> int:
        for _ in range(products):
            np.matmul(a, b, out=c)
        return 2 * SIDE ** 3 * products
    return run
