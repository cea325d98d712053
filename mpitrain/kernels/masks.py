"""Masks of bits: bit i of a mask is bit i % 8 of its byte i // 8, and 1 where element i is kept."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host

CHUNK = 1 << 16                                  # elements whose bits are bytes for a moment
INTEGERS = {4: "i4", 8: "i8"}


def to_bits(marks: Array) -> Array:
    """uint8 (ceil(n / 8),) of n marks, 0 or 1."""
    found: Array = array_module(marks).packbits(marks, bitorder="little")
    return found


def marks_of(bits: Array, first: int, count: int) -> Array:
    """uint8 (count,) of 0 and 1: elements `first`, ... of a mask."""
    start = first // 8
    marks = array_module(bits).unpackbits(bits[start:(first + count + 7) // 8], bitorder="little")
    found: Array = marks[first - 8 * start:first - 8 * start + count]
    return found


def _keep(values: Array, bits: Array, first: int) -> None:
    whole = values.view(INTEGERS[values.dtype.itemsize])
    for start in range(0, values.size, CHUNK):
        part = whole[start:start + CHUNK]
        part *= marks_of(bits, first + start, part.size)          # whole numbers: no NaN, and no -0


@host("masks", "keep_bits", "X!:n B:b in i ib")
def _keep_host(call: CFunction, values: Array, bits: Array, first: int) -> None:
    if first < 0 or first + values.size > 8 * bits.size:
        raise ShapeError(f"keep_bits: elements {first} to {first + values.size} of a mask of {8 * bits.size} bits")
    call(values, bits, values.size, first, bits.size)


keep_bits = Kernel("keep_bits", _keep, host=_keep_host)
"""Zeros in flat `values` where a mask has them, from (values, bits, the element of the mask that values[0] is)."""
