"""Operations of known shapes and weights, with what their forward works out at each call worked out once.

`PREPARED` has for a Function what makes a function of its first input from one use of it, or None where nothing is gained. The
bits are those of the Function's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Operation
from mpitrain.backend import Array
from mpitrain.kernels import convolution, linear, pool
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.product import LEAST_WORK
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.linalg import Linear
from mpitrain.ops.pool import MaxPool
from mpitrain.ops.shape import Reshape

Run = Callable[[Array], Array]
SMALL = 1 << 12                           # numbers
MOST_PACKED = 16 << 20                    # bytes of a weight that is kept packed besides; a larger one is packed at each call
Packed = dict[int, tuple[Array, Array | None]]                # a weight and the same packed, by the weight's identity


def prepared(operation: Operation, kept: Packed) -> Run | None:
    """The function of the operation's first input; None where its forward has to do. `kept` has weights that are packed
    already."""
    make = PREPARED.get(operation.function)
    others = operation.inputs[1:]
    if make is None or any(value is not None and getattr(value, "array", None) is None for value in others):
        return None
    return make(operation, kept, *[None if value is None else value.array for value in others])


def of_linear(operation: Operation, kept: Packed, weight: Array, bias: Array | None) -> Run | None:
    shape, name = operation.inputs[0].shape, operation.attributes["activation"]
    activation = None if name is None else ACTIVATIONS[name]
    if operation.attributes.get("operands") or operation.inputs[0].dtype != weight.dtype or not shape:
        return None
    rows, inputs = (prod(shape[:-1]), shape[-1])
    made = (*shape[:-1], len(weight))
    after = None if activation is None else activation.values.host() or activation.values.reference
    if name == "relu" and rows * len(weight) <= SMALL:
        after = relu_inside
    matrix = len(shape) == 2
    if linear.suits(np.empty((rows, inputs), weight.dtype), weight, activation, ""):
        return _packed(shape, weight, bias, activation, kept)
    if rows * inputs * len(weight) >= LEAST_WORK and rows > 1:
        return None
    by = weight.T

    def run(x: Array) -> Array:
        y = np.matmul(x if matrix else x.reshape(rows, inputs), by)
        if bias is not None:
            y += bias
        if after is not None:
            y = after(y, y)
        return y if matrix else y.reshape(made)
    return run


def _packed(shape: tuple[int, ...], weight: Array, bias: Array | None, activation: Any, kept: Packed) -> Run | None:
    """The layer with its weight packed, once for all batches."""
    if weight.nbytes > MOST_PACKED:
        return None
    if id(weight) not in kept:
        kept[id(weight)] = weight, linear.pack(weight)
    rows, packed = prod(shape[:-1]), kept[id(weight)][1]
    layer = None if packed is None else linear.packed_layer(rows, weight.shape, packed, bias, activation)
    if layer is None or len(shape) == 2:
        return layer
    return lambda x: layer(x.reshape(rows, shape[-1])).reshape(*shape[:-1], len(weight))


def relu_inside(x: Array, out: Array) -> Array:
    """ReLU of a few numbers, which costs less than the way to C."""
    return np.maximum(x, x.dtype.type(0), out=out)


def of_convolution(operation: Operation, kept: Packed, weight: Array, bias: Array | None) -> Run | None:
    if operation.attributes.get("operands") or operation.inputs[0].dtype != weight.dtype:
        return None
    found: Run | None = convolution.prepared(operation.inputs[0].shape, weight, bias, operation.attributes["window"],
                                                 operation.attributes["groups"])
    return found


def of_max_pool(operation: Operation, kept: Packed) -> Run | None:
    found: Run | None = pool.prepared_maximum(operation.inputs[0].shape, operation.inputs[0].dtype, **operation.attributes)
    return found


def of_reshape(operation: Operation, kept: Packed) -> Run:
    shape = operation.attributes["shape"]
    return lambda x: x.reshape(shape)


PREPARED: dict[Any, Callable[..., Run | None]] = {Linear: of_linear, Conv2d: of_convolution, MaxPool: of_max_pool,
                                                  Reshape: of_reshape}
