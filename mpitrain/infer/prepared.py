"""Operations of known shapes and weights, with what their forward works out at each call worked out once.

`PREPARED` has for a Function what makes a function of its first input from one use of it, or None where nothing is gained. The
bits are those of the Function's own forward, inside `row_by_row`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from mpitrain.autograd import Operation
from mpitrain.backend import Array
from mpitrain.kernels import convolution, linear, pool
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.linalg import Linear
from mpitrain.ops.pool import MaxPool
from mpitrain.ops.shape import Reshape

Run = Callable[[Array], Array]
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
    """The layer with its weight packed, once for all batches; of one row, too, which is as fast as reading it as it lies."""
    shape, name = operation.inputs[0].shape, operation.attributes["activation"]
    if (operation.attributes.get("operands") or operation.inputs[0].dtype != weight.dtype or not shape
            or weight.nbytes > MOST_PACKED):
        return None
    rows = prod(shape[:-1])
    if id(weight) not in kept:
        kept[id(weight)] = weight, linear.pack(weight)
    packed = kept[id(weight)][1]
    layer = None if packed is None else linear.packed_layer(rows, weight.shape, packed, bias,
                                                            None if name is None else ACTIVATIONS[name])
    if layer is None or len(shape) == 2:
        return layer
    return lambda x: layer(x.reshape(rows, shape[-1])).reshape(*shape[:-1], len(weight))


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
