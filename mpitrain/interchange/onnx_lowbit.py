"""How layers in few bits are written in ONNX: their whole numbers lie in the file under their own names. Letters: `M` rows, `N`
outputs, `K` inputs, `G` groups of 32 inputs.

    int8            DequantizeLinear of the weight before MatMul
    int4            MatMulNBits of com.microsoft, whose nibbles lie in another order; the file has them so, NAME.weight.nbits
    int8-dynamic, int8-static       rows become int8 by the arithmetic of `kernels.lowbit`, then MatMulInteger
    int4-dynamic    the same rows, as floats, in MatMulNBits

Rows are written out because DynamicQuantizeLinear has one scale for all of them, and QuantizeLinear divides where we multiply:
a number that lies between two whole ones would go to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.errors import UsageError
from mpitrain.interchange.onnx_file import NIBBLES
from mpitrain.interchange.onnx_graph import RULES, Graph, Step
from mpitrain.kernels.lowbit import GROUP, TINY, unpacked
from mpitrain.shrink import formats

MICROSOFT = "com.microsoft"
FLOAT, INT8, INT32, FLOAT32 = 1, 3, 6, np.float32            # TensorProto.DataType; and NumPy's
Product = Callable[[Graph, str, Any, str], str]
PRODUCTS: dict[type[Any], Product] = {}
"""By the class of a format, from (graph, x, layer, path): x @ weight.T without the bias."""
TABLES: dict[type[Any], Product] = {}
"""By the class of a format, from (graph, indices, layer, path): rows of a table as floats."""


def entered(table: dict[type[Any], Product], *kinds: type[Any]) -> Callable[[Product], Product]:
    def add(function: Product) -> Product:
        table.update(dict.fromkeys(kinds, function))
        return function
    return add


@RULES.register("LowBitProduct")
def product(graph: Graph, step: Step) -> str:
    y, bias = _written(PRODUCTS, graph, step, 0), graph.input(step, 1)
    return str(graph.add("Add", y, bias)) if bias else y


@RULES.register("LowBitRows")
def rows_of_table(graph: Graph, step: Step) -> str:
    return _written(TABLES, graph, step, 0)


def _written(table: dict[type[Any], Product], graph: Graph, step: Step, place: int) -> str:
    layer = step.links["layer"]
    write = table.get(type(layer.format))
    if write is None or step.one.outputs[0].dtype != FLOAT32:
        what = f"the format {type(layer.format).__name__}" if write is None else "few bits in float64"
        raise UsageError(f'ONNX: {what} of "{step.path}" has no rule; export the weights as floats (--dequantize), or register a '
                         "rule (docs/interchange.md)")
    return write(graph, graph.input(step, place), layer, f"{step.path}.".lstrip("."))


def kept(graph: Graph, layer: Any, path: str, name: str) -> str:
    """An array of a layer, under its own name."""
    graph.weights[path + name] = np.asarray(layer.arrays()[name])
    return path + name


def number(graph: Graph, value: float) -> str:
    return graph.constant(value, FLOAT32)


@entered(PRODUCTS, formats.Int8)
def int8(graph: Graph, x: str, layer: Any, path: str) -> str:
    weight = graph.add("DequantizeLinear", kept(graph, layer, path, "weight"), kept(graph, layer, path, "scale"), axis=0)
    return str(graph.add("MatMul", x, graph.add("Transpose", weight, perm=[1, 0])))


@entered(PRODUCTS, formats.Int4)
def int4(graph: Graph, x: str, layer: Any, path: str) -> str:
    scale = graph.add("Cast", kept(graph, layer, path, "scale"), to=FLOAT)
    scale = graph.add("Reshape", scale, graph.constant([-1]))
    whole = (unpacked(layer.arrays()["weight"]) + 8).astype(np.uint8)
    graph.weights[name := f"{path}weight{NIBBLES}"] = whole[..., ::2] | whole[..., 1::2] << 4
    return str(graph.add("MatMulNBits", x, name, scale, domain=MICROSOFT, K=layer.inputs, N=layer.outputs, bits=4,
                         block_size=GROUP))


def whole_rows(graph: Graph, x: str, layer: Any, path: str) -> tuple[str, str, str]:
    """(whole numbers -127..127 as floats, the scale of each row (..., 1) or of all, 0 or for rows that are not finite NaN) of x,
    as `kernels.lowbit.rows` makes them."""
    if isinstance(layer.format, formats.Int8Static):
        given = kept(graph, layer, path, "input_scale")
        tiny = graph.add("Less", given, number(graph, TINY))
        inverse = graph.add("Div", number(graph, 1), graph.add("Where", tiny, number(graph, 1), given))
        scale = given
    else:
        given = graph.add("ReduceMax", graph.add("Abs", x), axes=[-1], keepdims=1)
        tiny = graph.add("Less", given, number(graph, TINY))
        inverse = graph.add("Div", number(graph, 127), graph.add("Where", tiny, number(graph, 1), given))
        scale = graph.add("Div", given, number(graph, 127))
    inverse = graph.add("Where", tiny, number(graph, 0), inverse)
    q = graph.add("Clip", graph.add("Mul", x, inverse), number(graph, -127), number(graph, 127))
    finite = graph.add("ReduceSum", graph.add("Mul", x, number(graph, 0)), graph.constant([-1]), keepdims=1)
    return graph.add("Round", q), graph.add("Where", tiny, number(graph, 0), scale), finite


@entered(PRODUCTS, formats.Int8Dynamic, formats.Int8Static)
def int8_rows(graph: Graph, x: str, layer: Any, path: str) -> str:
    q, scale, finite = whole_rows(graph, x, layer, path)
    weight = graph.add("Transpose", kept(graph, layer, path, "weight"), perm=[1, 0])
    whole = graph.add("MatMulInteger", graph.add("Cast", q, to=INT8), weight)
    # The sum stands behind the product of scales: onnxruntime 1.32 takes that for one scale of all rows (MatMulIntegerToFloat)
    # where nothing is between it and the last product.
    scales = graph.add("Add", graph.add("Mul", scale, kept(graph, layer, path, "scale")), finite)
    return str(graph.add("Mul", graph.add("Cast", whole, to=FLOAT), scales))


@entered(PRODUCTS, formats.Int4Dynamic)
def int4_rows(graph: Graph, x: str, layer: Any, path: str) -> str:
    q, scale, finite = whole_rows(graph, x, layer, path)
    return str(graph.add("Mul", int4(graph, q, layer, path), graph.add("Add", scale, finite)))


@entered(TABLES, formats.Int8, formats.Int8Dynamic)
def table_of_int8(graph: Graph, indices: str, layer: Any, path: str) -> str:
    whole = graph.add("Cast", graph.add("Gather", kept(graph, layer, path, "weight"), indices), to=FLOAT)
    scale = graph.add("Gather", kept(graph, layer, path, "scale"), indices)
    return str(graph.add("Mul", whole, graph.add("Unsqueeze", scale, graph.constant([-1]))))


@entered(TABLES, formats.Int4, formats.Int4Dynamic)
def table_of_int4(graph: Graph, indices: str, layer: Any, path: str) -> str:
    """Byte i of a group has number i in its low half and i + 16 in its high one; opset 17 has no node for halves."""
    both = graph.add("Cast", graph.add("Gather", kept(graph, layer, path, "weight"), indices), to=INT32)      # (..., G, 16)
    sixteen = graph.constant(16, np.int32)
    whole = graph.add("Concat", graph.add("Mod", both, sixteen), graph.add("Div", both, sixteen), axis=-1)
    whole = graph.add("Cast", graph.add("Sub", whole, graph.constant(8, np.int32)), to=FLOAT)
    scale = graph.add("Cast", graph.add("Gather", kept(graph, layer, path, "scale"), indices), to=FLOAT)
    rows = graph.add("Mul", whole, graph.add("Unsqueeze", scale, graph.constant([-1])))
    shape = graph.add("Concat", graph.add("Shape", indices), graph.constant([-1]), axis=0)
    rows = graph.add("Reshape", rows, shape)
    if layer.inputs % GROUP:
        rows = graph.add("Slice", rows, graph.constant([0]), graph.constant([layer.inputs]), graph.constant([-1]))
    return str(rows)
