"""A kernel: a plain array expression that defines it, and compiled versions that must equal it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpitrain.backend.cache import one_at_a_time, prepare_numba
from mpitrain.backend.namespace import array_module

Function = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}              # tests run each compiled version against its reference


class Kernel:
    """`reference` works on any arrays and defines the result; `host`, in C or by Numba, is faster on arrays of NumPy.

    `host` is a factory, called at the first use, so that importing compiles nothing. It answers None where its version
    cannot be had (no compiler), and then the reference serves. The first argument decides where the kernel runs.
    """

    def __init__(self, name: str, reference: Function, host: Callable[[], Function | None] = lambda: None):
        self.name, self.reference, self.host = name, reference, cache(host)
        assert name not in KERNELS, f"kernel {name!r} defined twice"
        KERNELS[name] = self

    def __call__(self, *arguments: Any) -> Any:
        first = arguments[0]
        version = self.host() if type(first) is np.ndarray or array_module(first) is np else None
        return (version or self.reference)(*arguments)


def compiled(signature: Any) -> Callable[[Function], Function]:
    """Numba's njit with our settings: cached on disk, no interpreter lock, no fast-math (it changes bits).

    `signature` (a list for several dtypes) is explicit: a Python literal in a loop promotes float32 to float64 when types are
    left to inference. So all is compiled here, by one process at a time; the next ones find it on the disk. Where the cache
    folder takes no file each process compiles for itself, in memory.
    """
    prepare_numba()
    import numba
    settings: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def decorate(function: Function) -> Function:
        made: Function
        try:
            with one_at_a_time(f"numba-{function.__module__}.{function.__name__}"):
                made = numba.njit(signature, cache=True, **settings)(function)
        except (OSError, RuntimeError):           # saving fails; "no locator available" where its folder cannot be made
            made = numba.njit(signature, **settings)(function)
        return made
    return decorate
