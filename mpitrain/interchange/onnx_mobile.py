"""How the operations that the efficient convolutional nets add are written in ONNX: activations made of pieces, means, parts."""

from __future__ import annotations

from mpitrain.interchange.onnx_graph import Graph, Step, depends, rule


@rule("Hardtanh")
def hardtanh(graph: Graph, step: Step) -> str:
    dtype = step.one.outputs[0].dtype
    low, high = (graph.constant(step.attributes[name], dtype) for name in ("low", "high"))
    return str(graph.add("Clip", graph.input(step, 0), low, high))


@rule("Hardsigmoid")
def hardsigmoid(graph: Graph, step: Step) -> str:
    return str(graph.add("HardSigmoid", graph.input(step, 0), alpha=1 / 6, beta=0.5))


@rule("Hardswish")
def hardswish(graph: Graph, step: Step) -> str:
    return str(graph.add("HardSwish", graph.input(step, 0)))


@rule("Mean")
def mean(graph: Graph, step: Step) -> str:
    dim, n = step.attributes["dim"], len(step.shape(0))
    dims = range(n) if dim in (None, ()) else [dim] if isinstance(dim, int) else dim
    keepdims = int(step.attributes["keepdim"])
    return str(graph.add("ReduceMean", graph.input(step, 0), axes=[d % n for d in dims], keepdims=keepdims))


@rule("Split")
def split(graph: Graph, step: Step) -> list[str]:
    """By slices, whose sizes are one number each: GraphError where both recordings differ in them."""
    sizes = step.attributes["sizes"]
    if step.other.attributes["sizes"] != sizes:
        raise depends(graph, step, f"parts of sizes {', '.join(map(str, sizes))}")
    x, found, start = graph.input(step, 0), [], 0
    axis = graph.constant([step.attributes["dim"] % len(step.shape(0))])
    for size in sizes:
        found.append(str(graph.add("Slice", x, graph.constant([start]), graph.constant([start + size]), axis)))
        start += size
    return found
