"""Sums of several arrays in a stated order: the C kernel, and NumPy with the same bits where there is no compiler.

An order is a postfix program over source numbers: i pushes source i, ADD replaces the two topmost by their sum, the lower on
the left. Float rounding makes the order part of the result, so it is data that a caller chooses:

    left_fold(4)     0 1 + 2 + 3 +          ((0 + 1) + 2) + 3
    binary_tree(4)   0 1 + 2 3 + +          (0 + 1) + (2 + 3)
    binary_tree(3)   0 1 + 2 +              (0 + 1) + 2

float16 and bfloat16 are added up in float32 and rounded once, to the nearest, ties to even. NumPy has no bfloat16: such arrays
are uint16 and their type is said by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mpitrain.backend import native
from mpitrain.comm.messages.buffers import Host
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels.wire import REFERENCE
from mpitrain.schedules.steps import tree_split

ADD = -1
DEPTH = 32                                                    # the stack in native/shared.c holds no more
BLOCK = 1 << 14                                               # elements that NumPy sums at a time: 64 KiB of float32 stay in L2
TYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}     # native/shared.c numbers them so
STORAGE = {"bfloat16": np.dtype(np.uint16)}


def left_fold(n: int) -> list[int]:
    """Source 0, then each next one added on the right."""
    return [0, *(step for i in range(1, n) for step in (i, ADD))]


def binary_tree(n: int, start: int = 0) -> list[int]:
    """The fixed binary tree (`tree_split`) over ranks [start, start + n)."""
    if n == 1:
        return [start]
    left = tree_split(n)
    return [*binary_tree(left, start), *binary_tree(n - left, start + left), ADD]


def check_program(program: Sequence[int], n: int) -> None:
    """ConfigError unless the program adds each of `n` sources exactly once within the kernel's stack."""
    depth = deepest = 0
    for step in program:
        depth += 1 if step != ADD else -1
        deepest = max(deepest, depth)
        if depth < 1:
            break
    if depth != 1 or sorted(step for step in program if step != ADD) != list(range(n)):
        raise ConfigError(f"an order of summation must add up sources 0 to {n - 1}, each once, but is {list(program)[:20]}; "
                          f"see left_fold and binary_tree")
    if deepest > DEPTH:
        raise ConfigError(f"an order of summation holds {deepest} partial sums at once, more than {DEPTH}; "
                          f"add the longer side first")


def type_name(array: Any, dtype: str | None) -> str:
    """The name of an array's number type; ShapeError for a type without a kernel, or storage that is not the type's."""
    name = dtype or array.dtype.name
    if name not in TYPES:
        raise ShapeError(f"sums in shared memory exist for {', '.join(TYPES)}, not for {name}")
    if array.dtype != storage(name):
        raise ShapeError(f"{name} is stored as {storage(name)}, but the array is {array.dtype}; pass a view of that dtype")
    return name


def storage(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds a number type."""
    return STORAGE.get(name) or np.dtype(name)


def fold_numpy(sources: Sequence[Host], program: Sequence[int], destinations: Sequence[Host], start: int, stop: int,
               name: str) -> None:
    """Elements [start, stop) of every destination become the program's sum of the sources, which are flat and of one size: with
    the bits of the C kernel, a block at a time. A destination may be a source."""
    with np.errstate(over="ignore", invalid="ignore"):        # users of the sum look for Inf and NaN and say where
        for low in range(start, stop, BLOCK):
            block = slice(low, min(low + BLOCK, stop))
            stack: list[Host] = []
            for step in program:
                if step != ADD:
                    stack.append(widen(sources[step][block], name))
                else:
                    right = stack.pop()
                    stack[-1] = stack[-1] + right
            result = narrow(stack[0], name)
            for destination in destinations:
                destination[block] = result


def widen(array: Host, name: str) -> Host:
    """The array in the type that sums are made in: its own, or float32 for 16 bits."""
    if name not in REFERENCE:
        return array
    wide = np.empty(array.shape, np.float32)
    REFERENCE[name]["unpack"](array.view(np.uint16), wide)
    return wide


def narrow(array: Host, name: str) -> Host:
    """The array as stored; the inverse of `widen`, rounding as messages of 16 bits do."""
    if name not in REFERENCE:
        return array
    packed = np.empty(array.shape, np.uint16)
    REFERENCE[name]["pack"](array, packed)
    return packed.view(storage(name))


@cache
def kernels() -> ctypes.CDLL | None:
    """native/shared.c with its signatures declared; None without a compiler."""
    library = native.load("shared")
    if library is not None:
        p, i, c = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.shared_advance.argtypes, library.shared_advance.restype = [p, p, i, c, i, i], c
        library.shared_spread.argtypes, library.shared_spread.restype = [p, p, i], c
    return library


def addresses(arrays: Sequence[Host]) -> Any:
    """The arrays' addresses, as a C array of pointers."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
