"""How each operation is written in ONNX: one function for each Function, named as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.errors import UsageError
from mpitrain.interchange import onnx_indexing, onnx_lowbit, onnx_mobile, onnx_sequences  # noqa: F401  (their rules)
from mpitrain.interchange.onnx_graph import Graph, Step, rule
from mpitrain.kernels.pointwise import SQRT_HALF, TANH_CUBIC, TANH_SCALE
from mpitrain.kernels.pool import Side

PLAIN = {"Add": "Add", "Subtract": "Sub", "Multiply": "Mul", "Divide": "Div", "Power": "Pow", "MatMul": "MatMul",
         "Negative": "Neg", "Absolute": "Abs", "Exp": "Exp", "Log": "Log", "Sqrt": "Sqrt"}
"""Functions that ONNX has a node for, with the same inputs."""


@rule(*PLAIN)
def plain(graph: Graph, step: Step) -> str:
    return str(graph.add(PLAIN[step.name], *(graph.input(step, i) for i in range(len(step.one.inputs)))))


def dtype_of(step: Step) -> Any:
    return step.one.outputs[0].dtype


@rule("Pointwise", "Relu", "Sigmoidal")
def pointwise(graph: Graph, step: Step) -> str:
    return activated(graph, graph.input(step, 0), step.attributes["activation"], dtype_of(step))


def activated(graph: Graph, x: str, name: str | None, dtype: Any) -> str:
    """x after an activation; those that opset 17 has no node for are written out."""
    def number(value: float) -> str:
        return graph.constant(value, dtype)
    if name in ("relu", "tanh", "sigmoid"):
        return str(graph.add(name.capitalize(), x))
    if name == "silu":
        return str(graph.add("Mul", x, graph.add("Sigmoid", x)))
    if name == "gelu":
        inner = graph.add("Erf", graph.add("Mul", x, number(SQRT_HALF)))
    elif name == "gelu_tanh":
        cube = graph.add("Mul", graph.add("Mul", x, x), x)
        bent = graph.add("Add", x, graph.add("Mul", cube, number(TANH_CUBIC)))
        inner = graph.add("Tanh", graph.add("Mul", bent, number(TANH_SCALE)))
    elif name is None:
        return x
    else:
        raise UsageError(f"ONNX: the activation {name} has no rule")
    return str(graph.add("Mul", graph.add("Mul", x, number(0.5)), graph.add("Add", inner, number(1.0))))


@rule("Linear")
def linear(graph: Graph, step: Step) -> str:
    x, weight, bias = (graph.input(step, i) for i in range(3))
    if len(step.shape(0)) == 2:
        y = graph.add("Gemm", x, weight, *([bias] if bias else []), transB=1)
    else:                                         # of a constant: who runs the graph transposes it once
        y = graph.add("MatMul", x, graph.add("Transpose", weight, perm=[1, 0]))
        y = graph.add("Add", y, bias) if bias else y
    return activated(graph, y, step.attributes["activation"], dtype_of(step))


@rule("Embedding")
def embedding(graph: Graph, step: Step) -> str:
    return str(graph.add("Gather", graph.input(step, 1), graph.input(step, 0)))


@rule("Reshape")
def reshape(graph: Graph, step: Step) -> str:
    shapes = list(zip(step.one.outputs[0].shape, step.other.outputs[0].shape))
    moving = [d for d, pair in enumerate(shapes) if pair[0] != pair[1]]
    if len(moving) <= 1:
        shape = graph.constant([-1 if d in moving else pair[0] for d, pair in enumerate(shapes)])
    else:
        shape = graph.add("Concat", *(graph.size(step, pair) for pair in shapes), axis=0)
    return str(graph.add("Reshape", graph.input(step, 0), shape))


@rule("Transpose")
def transpose(graph: Graph, step: Step) -> str:
    n = len(step.shape(0))
    return str(graph.add("Transpose", graph.input(step, 0), perm=[d % n for d in step.attributes["dims"]]))


@rule("Concatenate")
def concatenate(graph: Graph, step: Step) -> str:
    return str(graph.add("Concat", *(graph.input(step, i) for i in range(len(step.one.inputs))), axis=step.attributes["dim"]))


@rule("Softmax", "LogSoftmax")
def softmax(graph: Graph, step: Step) -> str:
    return str(graph.add(step.name, graph.input(step, 0), axis=step.attributes["dim"]))


@rule("Conv2d")
def conv2d(graph: Graph, step: Step) -> str:
    window, bias = step.attributes["window"], graph.input(step, 2)
    return str(graph.add("Conv", graph.input(step, 0), graph.input(step, 1), *([bias] if bias else []),
                         kernel_shape=list(window.kernel), strides=list(window.stride), pads=[*window.padding] * 2,
                         dilations=list(window.dilation), group=step.attributes["groups"]))


@rule("ConvTranspose2d")
def conv_transpose2d(graph: Graph, step: Step) -> str:
    window, bias = step.attributes["window"], graph.input(step, 2)
    sides = zip(step.shape(0)[2:], window.kernel, window.stride, window.padding, window.dilation)
    sizes = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in sides]
    return str(graph.add("ConvTranspose", graph.input(step, 0), graph.input(step, 1), *([bias] if bias else []),
                         kernel_shape=list(window.kernel), strides=list(window.stride), pads=[*window.padding] * 2,
                         dilations=list(window.dilation), group=step.attributes["groups"],
                         output_padding=[size - least for size, least in zip(step.attributes["size"], sizes)]))


@rule("FixedNorm")
def fixed_norm(graph: Graph, step: Step) -> str:
    channels = step.shape(0)[1]
    weight = graph.input(step, 1) or graph.constant(np.ones(channels), dtype_of(step))
    bias = graph.input(step, 2) or graph.constant(np.zeros(channels), dtype_of(step))
    return str(graph.add("BatchNormalization", graph.input(step, 0), weight, bias, graph.input(step, 3), graph.input(step, 4),
                         epsilon=step.attributes["eps"]))


@rule("RowNorm")
def row_norm(graph: Graph, step: Step) -> str:
    x, weight, bias = (graph.input(step, i) for i in range(3))
    if not step.attributes["centred"]:
        dims = list(range(-len(step.shape(1)), 0))
        square = graph.add("ReduceMean", graph.add("Mul", x, x), axes=dims, keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", square, graph.constant(step.attributes["eps"], dtype_of(step))))
        return str(graph.add("Mul", graph.add("Div", x, root), weight))
    return normalised(graph, x, weight, bias, len(step.shape(1)), step.attributes["eps"])


def normalised(graph: Graph, x: str, weight: str, bias: str, dims: int, eps: float) -> str:
    return str(graph.add("LayerNormalization", x, weight, *([bias] if bias else []), axis=-dims, epsilon=eps))


@rule("AddRowNorm")
def add_row_norm(graph: Graph, step: Step) -> list[str]:
    total = graph.add("Add", graph.input(step, 0), graph.input(step, 1))
    weight, bias = graph.input(step, 2), graph.input(step, 3)
    return [total, normalised(graph, total, weight, bias, len(step.shape(2)), step.attributes["eps"])]


def window(side: Side) -> tuple[int, int, int, int] | None:
    """(kernel, stride, padding before, padding behind) of the windows along a dim; None where they are no fixed ones."""
    if side.count == 1:
        first, stop = side.starts[0], side.stops[0]
        return (stop - first, 1, 0, 0) if first == 0 else None
    for kernel in range(side.widest, side.size + 2):
        for before in range(kernel // 2 + 1):
            stride = side.starts[-1] + before
            if stride % (side.count - 1) or not (stride := stride // (side.count - 1)):
                continue
            starts = [i * stride - before for i in range(side.count)]
            if all(max(a, 0) == b and min(a + kernel, side.size) == c for a, b, c in zip(starts, side.starts, side.stops)):
                return kernel, stride, before, max(0, starts[-1] + kernel - side.size)
    return None


def pool(graph: Graph, step: Step, kind: str, **more: Any) -> str:
    sides = [window(step.attributes["rows"]), window(step.attributes["columns"])]
    if None in sides:
        raise UsageError(f'ONNX: the windows of the pool in "{step.path}" are of unequal sizes, which no node has; use images '
                         "whose size is a multiple of the output's")
    rows, columns = sides
    assert rows is not None and columns is not None
    return str(graph.add(kind, graph.input(step, 0), kernel_shape=[rows[0], columns[0]], strides=[rows[1], columns[1]],
                         pads=[rows[2], columns[2], rows[3], columns[3]], **more))


@rule("MaxPool")
def max_pool(graph: Graph, step: Step) -> str:
    largest = pool(graph, step, "MaxPool")
    return str(graph.add("Relu", largest)) if step.attributes["relu"] else largest


@rule("MeanPool")
def mean_pool(graph: Graph, step: Step) -> str:
    sides, counts = (step.attributes["rows"], step.attributes["columns"]), step.attributes["counts"]
    if all(side.starts == (0,) and side.stops == count == (side.size,) for side, count in zip(sides, counts)):
        return str(graph.add("GlobalAveragePool", graph.input(step, 0)))
    clipped = all(tuple(b - a for a, b in zip(side.starts, side.stops)) == tuple(count) for side, count in zip(sides, counts))
    if not clipped and any(len(set(count)) > 1 or (found := window(side)) is None or count[0] != found[0]
                           for side, count in zip(sides, counts)):
        raise UsageError(f'ONNX: the pool in "{step.path}" divides by numbers that are not its windows\' sizes')
    return pool(graph, step, "AveragePool", count_include_pad=int(not clipped))


@rule("Subsample")
def subsample(graph: Graph, step: Step) -> str:
    stride, ends = step.attributes["stride"], 2**31 - 1
    x = graph.add("Slice", graph.input(step, 0), graph.constant([0, 0]), graph.constant([ends, ends]), graph.constant([2, 3]),
                  graph.constant([stride, stride]))
    before, after = step.attributes["before"], step.attributes["after"]
    return str(graph.add("Pad", x, graph.constant([0, before, 0, 0, 0, after, 0, 0])) if before or after else x)
