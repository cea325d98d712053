"""How operations that choose, move and widen parts of arrays are written in ONNX, and those that change what numbers are."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd.record import Value
from mpitrain.errors import UsageError
from mpitrain.interchange.onnx_graph import Graph, Step, depends, rule

FIRST, LAST = -2**31, 2**31 - 1                   # before and behind all that an array has
TESTS = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}


@rule("Slice")
def sliced(graph: Graph, step: Step) -> str:
    """x[index] for numbers, slices, None and Ellipsis: one Slice, then Squeeze of the numbers' dims, then Unsqueeze for None."""
    index, x = step.attributes["index"], graph.input(step, 0)
    if index != step.other.attributes["index"]:
        raise depends(graph, step, f"an index {index}")
    n = len(step.shape(0))
    whole = n - sum(isinstance(entry, (int, slice)) for entry in index)
    at = next((place for place, entry in enumerate(index) if entry is Ellipsis), len(index))
    entries = [*index[:at], *[slice(None)] * whole, *index[at + 1:]]
    found: list[tuple[int, int, int, int]] = []
    single, new, dim, made = [], [], 0, 0
    for entry in entries:
        if entry is None:
            new.append(made)
        elif isinstance(entry, int):
            found.append((entry, LAST if entry == -1 else entry + 1, dim, 1))
            single.append(dim)
        elif entry != slice(None):
            by = 1 if entry.step is None else entry.step
            start, stop = (0, LAST) if by > 0 else (LAST, FIRST)
            found.append((start if entry.start is None else entry.start, stop if entry.stop is None else entry.stop, dim, by))
        dim += entry is not None
        made += not isinstance(entry, int)
    if found:
        x = graph.add("Slice", x, *(graph.constant(list(values)) for values in zip(*found)))
    x = graph.add("Squeeze", x, graph.constant(single)) if single else x
    return str(graph.add("Unsqueeze", x, graph.constant(new))) if new else x


@rule("Gather")
def gathered(graph: Graph, step: Step) -> str:
    """x[index] with one array of whole numbers, and all of the other dims."""
    index, numbers = step.attributes["index"], step.one.inputs[1]
    if sum(entry == "array" for entry in index) != 1 or numbers.dtype.kind not in "iu" or any(
            entry not in ("array", slice(None)) for entry in index):
        raise UsageError(f'ONNX: the index of Gather in "{step.path}" is more than one array of whole numbers, which has no rule')
    return str(graph.add("Gather", graph.input(step, 0), graph.input(step, 1), axis=index.index("array")))


@rule("Take")
def taken(graph: Graph, step: Step) -> str:
    return str(graph.add("Gather", graph.input(step, 0), graph.input(step, 1), axis=step.attributes["dim"]))


@rule("BroadcastTo")
def broadcast_to(graph: Graph, step: Step) -> str:
    sizes = (graph.size(step, pair) for pair in zip(step.one.outputs[0].shape, step.other.outputs[0].shape))
    return str(graph.add("Expand", graph.input(step, 0), graph.add("Concat", *sizes, axis=0)))


@rule("Clone")
def cloned(graph: Graph, step: Step) -> str:
    return graph.input(step, 0)


@rule("Pad")
def padded(graph: Graph, step: Step) -> str:
    widths = step.attributes["widths"]
    if widths != step.other.attributes["widths"]:
        raise depends(graph, step, f"widths {widths}")
    ends = [width[end] for end in (0, 1) for width in widths]
    value = graph.constant(step.attributes["value"], step.one.outputs[0].dtype)
    return str(graph.add("Pad", graph.input(step, 0), graph.constant(ends), value))


@rule("Roll")
def rolled(graph: Graph, step: Step) -> str:
    x = graph.input(step, 0)
    for shift, dim in zip(step.attributes["shifts"], step.attributes["dims"]):
        size, other = step.shape(0)[dim], step.other.inputs[0].shape[dim]
        if size != other:
            raise depends(graph, step, f"a dim of {size} and {other} that goes around")
        if shift % size:
            axis, cut = graph.constant([dim % len(step.shape(0))]), graph.constant([size - shift % size])
            behind = graph.add("Slice", x, cut, graph.constant([LAST]), axis)
            x = graph.add("Concat", behind, graph.add("Slice", x, graph.constant([0]), cut, axis), axis=dim)
    return x


@rule("Sum")
def summed(graph: Graph, step: Step) -> str:
    dim, n = step.attributes["dim"], len(step.shape(0))
    dims = range(n) if dim is None else [dim] if isinstance(dim, int) else dim
    return str(graph.add("ReduceSum", graph.input(step, 0), graph.constant([d % n for d in dims]),
                         keepdims=int(step.attributes["keepdim"])))


@rule("Where")
def where(graph: Graph, step: Step) -> str:
    def chosen(place: int) -> str:
        value = step.one.inputs[place]
        return graph.input(step, place) if isinstance(value, Value) else graph.constant(value, step.one.outputs[0].dtype)
    return str(graph.add("Where", graph.input(step, 0), chosen(1), chosen(2)))


@rule("Compare")
def compare(graph: Graph, step: Step) -> str:
    test, inputs = step.attributes["test"], (graph.input(step, 0), graph.input(step, 1))
    return str(graph.add("Not", graph.add("Equal", *inputs)) if test == "ne" else graph.add(TESTS[test], *inputs))


LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor", "logical_not": "Not"}


@rule(*LOGIC)
def logic(graph: Graph, step: Step) -> str:
    """A number is true where it is not 0: what Cast to bool says."""
    inputs = [graph.add("Cast", graph.input(step, i), to=9) for i in range(len(step.one.inputs))]
    return str(graph.add(LOGIC[step.name], *inputs))


@rule("CumSum")
def cumulative(graph: Graph, step: Step) -> str:
    reverse = int(step.attributes.get("back", False))
    return str(graph.add("CumSum", graph.input(step, 0), graph.constant(step.attributes["dim"]), reverse=reverse))


@rule("ToFloat32", "ToFloat64", "ToWhole")
def cast(graph: Graph, step: Step) -> str:
    return str(graph.add("Cast", graph.input(step, 0), to=graph.helper.np_dtype_to_tensor_dtype(step.one.outputs[0].dtype)))


@rule("Resample")
def resample(graph: Graph, step: Step) -> str:
    """A sum of a few chosen rows for each, with weights; a product with a matrix where rows are of many."""
    x, taps, n = graph.input(step, 0), step.links["taps"], len(step.shape(0))
    dim, dtype = step.attributes["dim"] % n, step.one.outputs[0].dtype
    if taps.copies:
        return str(graph.add("Gather", x, graph.constant(taps.index), axis=dim))
    if not taps.uniform:
        return _by_matrix(graph, x, taps, dim, n, dtype)
    total = ""
    for index, weight in zip(taps.index.reshape(-1, taps.uniform).T, taps.weight.reshape(-1, taps.uniform).T):
        part = graph.add("Mul", graph.add("Gather", x, graph.constant(index), axis=dim),
                         graph.constant(weight.reshape(-1, *[1] * (n - 1 - dim)), dtype))
        total = graph.add("Add", total, part) if total else part
    return total


def _by_matrix(graph: Graph, x: str, taps: Any, dim: int, n: int, dtype: Any) -> str:
    matrix = np.zeros((taps.size, taps.outputs))
    np.add.at(matrix, (taps.index, np.repeat(np.arange(taps.outputs), taps.counts)), taps.weight)
    order = [d for d in range(n) if d != dim] + [dim]
    y = graph.add("MatMul", graph.add("Transpose", x, perm=order), graph.constant(matrix, dtype))
    return str(graph.add("Transpose", y, perm=[order.index(d) for d in range(n)]))
