"""Parameters of a model that is looked at, whose values do not matter: all share some memory, and large matrices have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.backend import CPU, Device, namespace
from mpitrain.kernels.idle import zeros
from mpitrain.nn import Module

VALUE = 0.01                                 # value of every parameter
LARGE = 1 << 20                              # elements of a matrix from which on it is `Untouched`


class Untouched(np.ndarray[Any, Any]):
    """An array of any shape over one element. Nothing is written to it, and a product with it costs no more than its result.

    Everything else works as on an array of that shape, and what comes of it is an ordinary array.
    """

    @classmethod
    def of(cls, shape: Sequence[int], dtype: Any) -> Untouched:
        return np.ndarray.__new__(cls, tuple(shape), dtype, np.full(1, VALUE, dtype), strides=(0,) * len(shape))

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **options: Any) -> Any:
        target = inputs[0] if method == "at" else next(iter(options.get("out", ())), None)
        if isinstance(target, Untouched):
            return target
        if ufunc is np.matmul and method == "__call__" and not options:
            return product(*map(plain, inputs))
        return getattr(ufunc, method)(*map(plain, inputs), **options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is np.copyto and isinstance(arguments[0], Untouched):
            return None
        return plain(super().__array_function__(function, types, arguments, options))

    def __setitem__(self, index: Any, values: Any) -> None:
        pass


namespace.MODULES[Untouched] = np


def product(x: Any, y: Any) -> Any:
    """An array of the shape of ``x @ y``."""
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return zeros((*lead, *x.shape[-2:-1], *(y.shape[-1:] if y.ndim > 1 else ())), np.result_type(x, y))


def plain(array: Any) -> Any:
    """The array as NumPy's own."""
    return array.view(np.ndarray) if isinstance(array, Untouched) else array


@contextmanager
def lent_memory(chunks: Sequence[Module], precision: str, device: Device = CPU) -> Iterator[None]:
    """Parameters and gradients of models that have no memory: large matrices, whose products alone read them, are `Untouched`,
    and the rest shares an array of the largest one's size; on a device all do. `storage` describes a real one."""
    size, dtype, rounded = 1, None, None
    on_host = device.xp is np
    buffers = [buffer for chunk in chunks for _, buffer in chunk.named_buffers() if not buffer.allocated]
    for chunk in chunks:
        layout = chunk.describe(0, precision, device)
        size = max([size, *(s.stop - s.start for s in layout.segments if not (on_host and is_large(s.shape)))])
        dtype, rounded = layout.dtype, layout.compute_dtype if layout.is_mixed else None
    values, gradients = device.xp.full(size, VALUE, dtype), device.xp.zeros(size, dtype)
    copies = None if rounded is None else values.astype(rounded)
    for chunk in chunks:
        for parameter in chunk.parameters():
            large = on_host and is_large(parameter.shape)
            array, parameter.grad_buffer, copied = (
                None if flat is None else Untouched.of(parameter.shape, dtype) if large
                else flat[:parameter.size].reshape(parameter.shape) for flat in (values, gradients, copies))
            parameter.bind(array, copied)
    try:
        yield
    finally:
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            del parameter.array
            parameter.unrounded = None
            parameter.grad_buffer = None
        for buffer in buffers:                    # `describe` has given them values, and a plan cuts what has none.
            if buffer.allocated:
                del buffer.array


def is_large(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is `Untouched`: a convolution reads its whole kernel, of four dims, which is small."""
    return len(shape) in (2, 3) and int(np.prod(shape, dtype=object)) >= LARGE
