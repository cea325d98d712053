"""How attention and recurrent layers are written in ONNX. Letters: `B` batch, `H` heads, `L` queries, `S` keys, `D` width."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.errors import UsageError
from mpitrain.interchange.onnx_graph import Graph, Step, rule


@rule("SelfAttention")
def self_attention(graph: Graph, step: Step) -> str:
    """softmax(q k' / sqrt(D)) v of heads; with a cache, keys and values of earlier tokens come before those of these."""
    heads = step.attributes["heads"]
    width = step.shape(0)[2] // 3 // heads
    x = graph.add("Reshape", graph.input(step, 0), graph.constant([0, 0, 3, heads, width]))
    x = graph.add("Transpose", x, perm=[2, 0, 3, 1, 4])                                # (3, B, H, L, D)
    q, k, v = (graph.add("Gather", x, graph.constant(i), axis=0) for i in range(3))
    length = step.shape(0)[1]
    y = graph.add("Transpose", attended(graph, step, q, k, v, (heads, width, width), (length, length)), perm=[0, 2, 1, 3])
    return str(graph.add("Reshape", y, graph.constant([0, 0, heads * width])))


@rule("Attention", "MaskedAttention")
def attention(graph: Graph, step: Step) -> str:
    q, k, v = (graph.input(step, i) for i in range(3))
    mask = step.one.inputs[3] if step.name == "MaskedAttention" else None
    given = "" if mask is None else graph.input(step, 3)
    (*_, heads, length, width), (*_, keys, of_values) = step.shape(0), step.shape(2)
    return attended(graph, step, q, k, v, (heads, width, of_values), (length, keys), given,
                    boolean=mask is not None and mask.dtype == bool)


def attended(graph: Graph, step: Step, q: str, k: str, v: str, sizes: tuple[int, int, int], lengths: tuple[int, int],
             mask: str = "", boolean: bool = False) -> str:
    """softmax(scale q k' + mask) v; `sizes` are the heads and the widths of keys and values. Who may look nowhere gets zeros."""
    dtype = step.one.outputs[0].dtype
    away = graph.constant(-math.inf, dtype)
    if graph.cache:
        if mask or not step.attributes["causal"]:
            raise UsageError(f'--cache: the attention in "{step.path}" looks at what comes later, or has a mask, so no token can '
                             "be computed before the next; leave it out")
        k, v = cached(graph, k, v, sizes, dtype)
    q = graph.add("Mul", q, graph.constant(step.attributes["scale"], dtype))
    scores = graph.add("MatMul", q, graph.add("Transpose", k, perm=[0, 1, 3, 2]))
    if mask:
        scores = graph.add("Where", mask, scores, away) if boolean else graph.add("Add", scores, mask)
    if step.attributes["causal"]:
        scores = graph.add("Where", causal(graph, q, k, lengths), scores, away)
    weights = graph.add("Softmax", scores, axis=-1)
    if mask:
        nowhere = graph.add("Equal", graph.add("ReduceMax", scores, axes=[-1], keepdims=1), away)
        weights = graph.add("Where", nowhere, graph.constant(0, dtype), weights)
    return str(graph.add("MatMul", weights, v))


def cached(graph: Graph, k: str, v: str, sizes: tuple[int, int, int], dtype: Any) -> list[str]:
    """Keys and values of all tokens so far (B, H, earlier + L, D): inputs and outputs of the graph, by layer."""
    layer, found, heads = len(graph.extra_inputs) // 2, [], sizes[0]
    for name, new, width in (("key", k, sizes[1]), ("value", v, sizes[2])):
        graph.extra_inputs.append((f"past_key_values.{layer}.{name}", dtype, ["batch", heads, "past", width]))
        graph.nodes.append(graph.helper.make_node("Concat", [f"past_key_values.{layer}.{name}", new],
                                                  [f"present.{layer}.{name}"], axis=2, name=f"present_{layer}_{name}"))
        graph.extra_outputs.append((f"present.{layer}.{name}", dtype, ["batch", heads, "total", width]))
        found.append(f"present.{layer}.{name}")
    return found


def causal(graph: Graph, q: str, k: str, lengths: tuple[int, int]) -> str:
    """(L, earlier + S), True where a token sees another one; made once for all layers of these lengths."""
    name = f"causal_{lengths[0]}_{lengths[1]}"
    if name not in graph.ranges:
        shape = graph.add("Concat", graph.add("Shape", q, start=2, end=3), graph.add("Shape", k, start=2, end=3), axis=0)
        ones = graph.add("ConstantOfShape", shape, value=graph.helper.make_tensor("one", 7, [1], [1]))
        lower = graph.add("Trilu", ones, *([graph.past()] if graph.cache else []), upper=0)
        graph.ranges[name] = graph.add("Cast", lower, to=9)
    return graph.ranges[name]


GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""ONNX's order of gates in terms of ours, which is PyTorch's: LSTM input, output, forget, cell; GRU update, reset, new."""


@rule(*GATES)
def recurrent(graph: Graph, step: Step) -> list[str]:
    """One layer in one direction, of sequences that all have as many steps. Its weights are sorted by gates in the graph."""
    kind, sizes = step.name, step.links["sizes"]
    if step.one.inputs[5] is not None or sizes.min() != sizes.max():
        raise UsageError(f'ONNX: {kind} in "{step.path}" has a projection, or sequences of several lengths, which has no rule')
    (outputs, hidden), gates = step.shape(2), GATES[kind]
    order = graph.constant(np.concatenate([np.arange(hidden) + gate * hidden for gate in gates]))

    def sorted_by_gates(place: int) -> str:
        name = graph.input(step, place)
        return str(graph.add("Gather", name, order) if name else graph.constant(np.zeros(outputs), step.one.outputs[0].dtype))

    front = graph.constant([0])
    weights = [graph.add("Unsqueeze", sorted_by_gates(place), front) for place in (1, 2)]
    bias = graph.add("Unsqueeze", graph.add("Concat", sorted_by_gates(3), sorted_by_gates(4), axis=0), front)
    states = [graph.add("Unsqueeze", name, front) if (name := graph.input(step, 6 + i)) else ""
              for i in range(len(step.one.inputs) - 6)]
    length = graph.size(step, (len(sizes), len(step.other.links["sizes"])))
    x = graph.add("Reshape", graph.input(step, 0), graph.add("Concat", length, graph.constant([-1, step.shape(0)[1]]), axis=0))
    more: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    if kind == "RNN":
        more["activations"] = ["Relu" if step.attributes["relu"] else "Tanh"]
    y, *last = graph.add(kind, x, *weights, bias, "", *states, outputs=len(step.one.outputs), hidden_size=hidden,
                         direction="reverse" if step.attributes["reverse"] else "forward", **more)
    return [graph.add("Reshape", y, graph.constant([-1, hidden])), *(graph.add("Squeeze", one, front) for one in last)]
