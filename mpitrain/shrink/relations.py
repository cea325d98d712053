"""The rules of channels of our own Functions: see `shrink.graph`. Of products of two activations and softmax there are none:
their channels stay."""

from __future__ import annotations

import math
from typing import Any

from mpitrain.autograd import Operation, Value
from mpitrain.ops.activation import LeakyRelu, Pointwise, Softplus
from mpitrain.ops.attention import SelfAttention
from mpitrain.ops.binary import Binary
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.creation import Clone, ToFloat32
from mpitrain.ops.dropout import Dropout
from mpitrain.ops.elementwise import Absolute, Add, Divide, Exp, Log, Multiply, Negative, Power, Sqrt, Subtract
from mpitrain.ops.index import Embedding
from mpitrain.ops.layer_norm import AddRowNorm, RowNorm
from mpitrain.ops.linalg import Linear
from mpitrain.ops.normalisation import BatchNorm, FixedNorm
from mpitrain.ops.pool import MaxPool, MeanPool, Subsample
from mpitrain.ops.rectifiers import Elu, Hardsigmoid, Hardswish, Hardtanh, Shrink, Threshold
from mpitrain.ops.reduce import Extremum, LogSumExp, Mean, Sum, Variance
from mpitrain.ops.shape import Pad, Reshape, Transpose
from mpitrain.ops.unary import Square, Unary
from mpitrain.shrink.graph import Relations, relates


def _alike(relations: Relations, x: Any, y: Value) -> None:
    """Two arrays that are broadcast together; a dim of 1 is no channel of the other's."""
    for dim in range(1, len(x.shape) + 1 if isinstance(x, Value) else 1):
        if x.shape[-dim] == y.shape[-dim]:
            relations.link(x, -dim, y, -dim)


@relates(Absolute, Add, Binary, Clone, Divide, Dropout, Elu, Exp, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, Log, Multiply,
         Negative, Pointwise, Power, Shrink, Softplus, Sqrt, Square, Subtract, Threshold, ToFloat32, Unary)
def _elementwise(relations: Relations, operation: Operation) -> None:
    for out in operation.outputs:
        for x in operation.inputs:
            _alike(relations, x, out)


@relates(Linear)
def _linear(relations: Relations, operation: Operation) -> None:
    (x, weight, bias), (y,) = operation.inputs, operation.outputs
    relations.link(x, -1, weight, 1)
    relations.link(weight, 0, y, -1)
    for dim in range(len(x.shape) - 1):
        relations.link(x, dim, y, dim)
    if bias is not None:
        relations.link(bias, 0, weight, 0)
    relations.multiply(x, -1, weight, y)


@relates(Conv2d)
def _convolution(relations: Relations, operation: Operation) -> None:
    (x, weight, bias), (y,) = operation.inputs, operation.outputs
    relations.link(x, 0, y, 0)
    if operation.attributes["groups"] == 1:
        relations.link(x, 1, weight, 1)
    else:
        for value in (x, weight, y):
            relations.fix(value, f"{operation.path} is a grouped convolution", *(0, 1)[:len(value.shape)])
    relations.link(weight, 0, y, 1)
    if bias is not None:
        relations.link(bias, 0, weight, 0)
    for value in (x, y):
        relations.fix(value, "it is no channel, but a place of the image", 2, 3)
    if not weight.name:                           # it is a parameter with other dims, perhaps
        relations.fix(weight, "it is no channel, but a place of the kernel", 2, 3)
    window = operation.attributes["window"]
    turned = window.kernel == (3, 3) and window.stride == window.dilation == (1, 1)
    relations.multiply(x, 1, weight, y, turned)


@relates(BatchNorm, FixedNorm)
def _by_channel(relations: Relations, operation: Operation) -> None:
    y = operation.outputs[0]
    for x in operation.inputs:
        if isinstance(x, Value) and len(x.shape) == 1:
            relations.link(x, 0, y, 1)
        else:
            _alike(relations, x, y)


@relates(RowNorm, AddRowNorm)
def _by_row(relations: Relations, operation: Operation) -> None:
    """The statistics of a row are over its channels: without one they are others, and the model is another."""
    _elementwise(relations, operation)
    weight = next(x for x in operation.inputs if isinstance(x, Value) and len(x.shape) < len(operation.outputs[0].shape))
    relations.fix(weight, f"the statistics of {operation.path or operation.name} are over these channels")


@relates(MaxPool, MeanPool)
def _pool(relations: Relations, operation: Operation) -> None:
    x, y = operation.inputs[0], operation.outputs[0]
    for value in (x, y):
        relations.fix(value, "it is no channel, but a place of the image", *range(2, len(x.shape)))
    relations.link(x, 0, y, 0)
    relations.link(x, 1, y, 1)


@relates(Subsample)
def _subsample(relations: Relations, operation: Operation) -> None:
    """Zero channels are put before and after those of x."""
    x, y = operation.inputs[0], operation.outputs[0]
    relations.link(x, 0, y, 0)
    relations.link(x, 1, y, 1, start=operation.attributes["before"])
    for value in (x, y):
        relations.fix(value, "it is no channel, but a place of the image", 2, 3)


@relates(Pad)
def _pad(relations: Relations, operation: Operation) -> None:
    x, y = operation.inputs[0], operation.outputs[0]
    for dim, around in enumerate(operation.attributes["widths"]):
        if tuple(around) == (0, 0):
            relations.link(x, dim, y, dim)
        else:
            for value in (x, y):
                relations.fix(value, f"{operation.path or operation.name} pads them", dim)


@relates(Mean, Sum, Extremum, Variance, LogSumExp)
def _reduction(relations: Relations, operation: Operation) -> None:
    """What is reduced over stays: a mean over fewer is another."""
    x, (y,) = operation.inputs[0], operation.outputs
    dim, kept = operation.attributes["dim"], operation.attributes["keepdim"]
    over = {d % len(x.shape) for d in (range(len(x.shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,))}
    relations.fix(x, f"{operation.name} goes over them", *over)
    stay = [d for d in range(len(x.shape)) if kept or d not in over]
    for place, d in enumerate(stay):
        if d not in over:
            relations.link(x, d, y, place)


@relates(Embedding)
def _embedding(relations: Relations, operation: Operation) -> None:
    """A table may be computed, as that of distances in a text is."""
    weight, y = operation.inputs[1], operation.outputs[0]
    relations.link(weight, 1, y, -1)
    relations.fix(weight, "it is the table's number of rows", 0)


@relates(SelfAttention)
def _self_attention(relations: Relations, operation: Operation) -> None:
    """A head's queries, keys and values go together, and its outputs with them: heads are cut whole."""
    qkv, y = operation.inputs[0], operation.outputs[0]
    inner = y.shape[2]
    relations.link(qkv, 0, y, 0)
    relations.link(qkv, 1, y, 1)
    relations.whole(y, 2, inner // operation.attributes["heads"])
    for part in range(3):
        relations.link(y, 2, qkv, 2, start=part * inner)


@relates(Transpose)
def _transpose(relations: Relations, operation: Operation) -> None:
    x, y = operation.inputs[0], operation.outputs[0]
    for dim, source in enumerate(operation.attributes["dims"]):
        relations.link(x, source, y, dim)


@relates(Reshape)
def _reshape(relations: Relations, operation: Operation) -> None:
    """Dims that become one: the first of them has its channels in runs. Dims in which other dims begin in the middle stay."""
    x, y = operation.inputs[0], operation.outputs[0]
    if x.name and x.shape[:1] == y.shape[:1]:
        relations.reshaped[y] = x
    for before, after in _runs(x.shape, y.shape):
        if len(before) == 1:
            _merged(relations, y, after, x, before[0])
        elif len(after) == 1:
            _merged(relations, x, before, y, after[0])
        else:
            for value, dims in ((x, before), (y, after)):
                relations.fix(value, f"it is cut across by the reshape of {operation.path}", *dims)


def _merged(relations: Relations, many: Value, dims: list[int], one: Value, dim: int) -> None:
    relations.link(many, dims[0], one, dim, run=math.prod([many.shape[d] for d in dims[1:]]))
    if dims[1:]:
        relations.fix(many, "it is no channel, but a place in one", *dims[1:])


def _runs(shape: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims of two shapes that have equal products; dims of 1 are left out."""
    left, right = [d for d, n in enumerate(shape) if n != 1], [d for d, n in enumerate(other) if n != 1]
    found = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (sizes := (math.prod([shape[d] for d in a]), math.prod([other[d] for d in b])))[0] != sizes[1]:
            a, b = (a + [left.pop(0)], b) if sizes[0] < sizes[1] else (a, b + [right.pop(0)])
        found.append((a, b))
    return found
