"""Kernels that take their memory and compute nothing: for a pass that is run to see what it keeps.

A kernel's body makes its results and working memory, and calls a function of C. While `idle` is entered, functions that write
floats alone are not called. What they would have written is zero where it is not large: scores, by which a mixture of experts
chooses, so that it chooses alike each time. Large arrays are left as they are: to touch their pages for the first time takes
longer than all the rest. Functions that write numbers of rows, masks and the like run, since others read these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpitrain.kernels.door import Slot, slots_of
from mpitrain.kernels.kernel import KERNELS, Kernel, kind
from mpitrain.kernels.library import Host

LARGE = 4 << 20       # bytes from which an array is left as it is: scores of 4 rows of 1,024 tokens for 255 experts are less


@contextmanager
def idle() -> Iterator[None]:
    """The kernels known by now, where they run as C, on arrays of the host."""
    was = {kernel: kernel.host for kernel in KERNELS.values()} if kind() == "c" else {}
    for kernel in was:
        if (body := _idle_body(kernel)) is not None:
            kernel.host = partial(_same, body)
    try:
        yield
    finally:
        for kernel, host in was.items():
            kernel.host = host


def _same(body: Callable[..., Any]) -> Callable[..., Any]:
    return body


def _idle_body(kernel: Kernel) -> Callable[..., Any] | None:
    """The kernel's body with a function that zeroes what it is to write; None where it must run."""
    found = kernel.on_host
    if not isinstance(found, Host):
        return None
    slots = slots_of(found.signature)
    written = [slot.kind for slot in slots if slot.written]
    return partial(found.body, partial(_zero, slots)) if set(written) <= {"X", "F", "M"} else None


def _zero(slots: tuple[Slot, ...], *arguments: Any) -> None:
    for slot, array in zip(slots, arguments):
        if slot.written and slot.kind != "M" and array is not None:
            array = array if slot.size else whole(array)
            if array.nbytes < LARGE:
                array.fill(0)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array that is zero where it is not large."""
    return (np.zeros if np.dtype(dtype).itemsize * prod(shape) < LARGE else np.empty)(shape, dtype)


def whole(array: Any) -> Any:
    """The array that a view is of: a function without the size of an array is given its first row."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
