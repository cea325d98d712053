"""The graph of a model as ONNX wants it, made of two recordings of its operations with other batches and lengths.

What differs between the two is symbolic: a dim that was 2 and 3, the batches, is the batch. So no operation has to say how its
shapes come about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd import no_grad
from mpitrain.autograd.record import Operation, Value, record
from mpitrain.errors import GraphError, UsageError
from mpitrain.nn import Module
from mpitrain.registry import Registry

Array = np.ndarray[Any, Any]
Rule = Callable[["Graph", "Step"], Any]
RULES: Registry[Rule] = Registry("operation of ONNX export")
"""By the name of a Function: what adds its nodes, and returns the names of its outputs. `onnx_rules.py` has them."""
OPSET = 17                                        # LayerNormalization came with it
BATCH, LENGTH = "batch", "length"


class Step:
    """One operation in both recordings."""

    def __init__(self, one: Operation, other: Operation):
        self.one, self.other = one, other
        self.name, self.path, self.attributes, self.links = one.name, one.path, one.attributes, one.links

    def array(self, place: int) -> Array | None:
        """An input that no operation computed, None where one did, or where there is none."""
        value = self.one.inputs[place]
        return value.array if isinstance(value, Value) else None

    def shape(self, place: int) -> tuple[int, ...]:
        return tuple(self.one.inputs[place].shape)


class Graph:
    """Nodes, initialisers, inputs and outputs by name; `sizes` are the symbolic dims with their values in both recordings."""

    def __init__(self, helper: Any, sizes: Mapping[str, tuple[int, int]], cache: bool):
        self.helper, self.sizes, self.cache = helper, sizes, cache
        self.nodes: list[Any] = []
        self.weights: dict[str, Array] = {}
        self.extra_inputs: list[tuple[str, Any, list[Any]]] = []
        self.extra_outputs: list[tuple[str, Any, list[Any]]] = []
        self.names: dict[int, str] = {}           # of values of the first recording, by number
        self.ranges: dict[str, str] = {}
        self.n = 0

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a node; the name of its output, or a list of names."""
        made = [self.new(kind) for _ in range(outputs)]
        self.nodes.append(self.helper.make_node(kind, list(inputs), made, name=f"{kind}_{self.n}", **attributes))
        return made[0] if outputs == 1 else made

    def new(self, kind: str) -> str:
        self.n += 1
        return f"{kind}_{self.n}_out"

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """An initialiser of its own for these numbers; equal ones share it. No layer has a name with "/"."""
        array = np.asarray(values, dtype)
        name = next((name for name, other in self.weights.items() if name.startswith("/constant_") and other.dtype == array.dtype
                     and other.shape == array.shape and other.tobytes() == array.tobytes()), "")
        if not name:
            self.n += 1
            name = f"/constant_{self.n}"
            self.weights[name] = array
        return name

    def input(self, step: Step, place: int) -> str:
        """The name of an operation's input; "" where it has none."""
        value, other = step.one.inputs[place], step.other.inputs[place]
        if value is None:
            return ""
        if not isinstance(value, Value):
            dtype = next((v.dtype for v in step.one.inputs if isinstance(v, Value)), np.dtype("float32"))
            if value != other:
                raise depends(step, f"the number {value}")
            return self.constant(value, dtype)
        if value.number not in self.names:
            self.names[value.number] = self._given(step, value, other)
        return self.names[value.number]

    def _given(self, step: Step, value: Value, other: Value) -> str:
        """An array that is no input of the model: a parameter, a buffer, places 0 ... length - 1, or a constant."""
        assert value.array is not None and other.array is not None
        array, again = np.asarray(value.array), np.asarray(other.array)
        if value.name:
            self.weights[value.name] = array
            return value.name
        if array.shape == again.shape and array.tobytes() == again.tobytes():
            return self.constant(array, array.dtype)
        if array.ndim == 1 and array.dtype == again.dtype == np.int64 and all(np.array_equal(a, np.arange(len(a)))
                                                                             for a in (array, again)):
            start = self.past() if self.cache else self.constant(0)
            if start not in self.ranges:
                stop = self.add("Squeeze", self.size(step, (len(array), len(again))))
                stop = self.add("Add", start, stop) if self.cache else stop
                self.ranges[start] = self.add("Range", start, stop, self.constant(1))
            return self.ranges[start]
        raise depends(step, f"an array of shape {list(array.shape)}")

    def past(self) -> str:
        """The number of tokens before these, whose keys and values come in; a number without dims."""
        if "past" not in self.ranges:
            shape = self.add("Shape", "past_key_values.0.key", start=2, end=3)
            self.ranges["past"] = self.add("Squeeze", shape)
        return self.ranges["past"]

    def symbol(self, pair: tuple[int, int]) -> int | str | None:
        """A dim with these values in the recordings: a number, the name of a symbolic one, or None for what is neither."""
        if pair[0] == pair[1]:
            return pair[0]
        return next((name for name, sizes in self.sizes.items() if sizes == pair), None)

    def size(self, step: Step, pair: tuple[int, int]) -> str:
        """The name of an int64 tensor of one element with such a dim. GraphError where it is neither batch nor length."""
        symbol = self.symbol(pair)
        if isinstance(symbol, int):
            return self.constant([symbol])
        if symbol is not None:
            key = f"size_{symbol}"
            if key not in self.ranges:
                axis = list(self.sizes).index(symbol)
                self.ranges[key] = self.add("Shape", INPUT, start=axis, end=axis + 1)
            return self.ranges[key]
        raise depends(step, f"a size of {pair[0]} and {pair[1]}")


INPUT = "input"


def depends(step: Step, what: str) -> GraphError:
    return GraphError(f'ONNX: {step.name} in "{step.path}" has {what}, which depends on the batch or the length in a way that '
                      "the graph cannot have; write that part of the model without it")


def traced(model: Module, samples: Sequence[Array], helper: Any, sizes: Mapping[str, tuple[int, int]], cache: bool
           ) -> tuple[Graph, str, list[int | str]]:
    """(graph, the name of the model's output, its dims). UsageError for an operation without a rule, which it names."""
    recordings, results = [], []
    for sample in samples:
        with no_grad(), record() as operations:
            results.append(model(sample))
        recordings.append(operations)
    graph = Graph(helper, sizes, cache)
    first, second = recordings
    if [op.name for op in first] != [op.name for op in second]:
        raise GraphError("ONNX: the model computes other operations for other batches or lengths, so it has no one graph")
    for value in first[0].inputs if first else ():
        if isinstance(value, Value) and value.array is samples[0]:
            graph.names[value.number] = INPUT
    for step in map(Step, first, second):
        if step.name not in RULES:
            raise UsageError(f'ONNX: the operation {step.name}, in "{step.path}", has no rule; write one, and register it in '
                             "mpitrain.interchange.onnx_graph.RULES (docs/interchange.md)")
        names = RULES[step.name](graph, step)
        for value, name in zip(step.one.outputs, [names] if isinstance(names, str) else names, strict=True):
            graph.names[value.number] = name
    last = first[-1].outputs[0].number
    dims = [graph.symbol(pair) for pair in zip(*(result.shape for result in results))]
    return graph, graph.names[last], ["rows" if dim is None else dim for dim in dims]
