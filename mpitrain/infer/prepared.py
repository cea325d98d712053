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
from mpitrain.kernels.product import is_fast, native
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.linalg import Linear
from mpitrain.ops.pool import MaxPool
from mpitrain.ops.shape import Reshape

Run = Callable[[Array], Array]
MOST_TURNED = 16 << 20                    # bytes of a weight that is kept turned besides; a larger one is packed at each call
Turned = dict[int, tuple[Array, Array]]      # a weight and the same turned, by the weight's identity


def prepared(operation: Operation, kept: Turned) -> Run | None:
    """The function of the operation's first input; None where its forward has to do. `kept` has weights that others have turned
    already."""
    make = PREPARED.get(operation.function)
    others = operation.inputs[1:]
    if make is None or any(value is not None and getattr(value, "array", None) is None for value in others):
        return None
    return make(operation, kept, *[None if value is None else value.array for value in others])


def of_linear(operation: Operation, kept: Turned, weight: Array, bias: Array | None) -> Run | None:
    shape, name = operation.inputs[0].shape, operation.attributes["activation"]
    activation = None if name is None else ACTIVATIONS[name]
    if operation.attributes.get("operands") or operation.inputs[0].dtype != weight.dtype or not shape:
        return None
    rows, inputs = (prod(shape[:-1]), shape[-1])
    made = (*shape[:-1], len(weight))
    after = None if activation is None else activation.values.host() or activation.values.reference
    ours = linear.suits(np.empty((rows, inputs), weight.dtype), weight, activation, "")
    if not ours and rows * inputs * len(weight) >= 1 << 20 and rows > 1:
        return None
    multiply = native.host() if ours else None
    if ours and (multiply is None or not is_fast() or weight.nbytes > MOST_TURNED):
        return None
    by = turned(weight, kept) if ours else weight.T

    def run(x: Array) -> Array:
        flat = x.reshape(rows, inputs)
        if multiply is not None:
            y = multiply(flat, by, bias, None)
        else:
            y = np.matmul(flat, by)
            if bias is not None:
                y += bias
        if after is not None:
            y = after(y, y)
        return y.reshape(made)
    return run


def turned(weight: Array, kept: Turned) -> Array:
    """The weight (O, I) as an array (I, O), whose blocks C packs while it multiplies."""
    if id(weight) not in kept:
        kept[id(weight)] = weight, np.ascontiguousarray(weight.T)
    return kept[id(weight)][1]


def of_convolution(operation: Operation, kept: Turned, weight: Array, bias: Array | None) -> Run | None:
    if operation.attributes.get("operands") or operation.inputs[0].dtype != weight.dtype:
        return None
    found: Run | None = convolution.prepared(operation.inputs[0].shape, weight, bias, operation.attributes["window"],
                                                 operation.attributes["groups"])
    return found


def of_max_pool(operation: Operation, kept: Turned) -> Run | None:
    found: Run | None = pool.prepared_maximum(operation.inputs[0].shape, operation.inputs[0].dtype, **operation.attributes)
    return found


def of_reshape(operation: Operation, kept: Turned) -> Run:
    shape = operation.attributes["shape"]
    return lambda x: x.reshape(shape)


PREPARED: dict[Any, Callable[..., Run | None]] = {Linear: of_linear, Conv2d: of_convolution, MaxPool: of_max_pool,
                                                  Reshape: of_reshape}
