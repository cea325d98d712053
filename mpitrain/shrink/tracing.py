"""One run of a model on two rows, and the groups of channels that its operations tell of."""

from __future__ import annotations

from typing import Any

from mpitrain import nn
from mpitrain.autograd import Operation, Value, no_grad, record
from mpitrain.shrink import relations as relations  # the rules of our own Functions
from mpitrain.shrink.graph import RULES, Graph, Relations


def trace(model: nn.Module, rows: Any) -> Graph:
    """The groups of a model that has values and is in eval mode; `rows` is an input of two samples."""
    with no_grad(), record() as operations:
        model(rows)
    found = Relations()
    read = {value for operation in operations for value in operation.inputs if isinstance(value, Value)}
    for operation in operations:
        rule = next((RULES[base] for base in operation.function.__mro__ if base in RULES), _unknown)
        for value in operation.inputs:
            if isinstance(value, Value) and value.array is not None and not value.name:
                found.fix(value, "it meets the model's input, or a constant")
        rule(found, operation)
        for value in operation.outputs:
            if value not in read or operation is operations[-1]:
                found.fix(value, "it is the model's output")
    return Graph(found.groups(), tuple(found.products), tuple(found.uncounted))


def _unknown(found: Relations, operation: Operation) -> None:
    where = f" of {operation.path}" if operation.path else ""
    if any(isinstance(value, Value) and value.name and len(value.shape) > 1 for value in operation.inputs):
        found.uncounted[f"the work of the operation {operation.name}{where} is not counted: it has no rule of channels"] = None
    for value in (*operation.inputs, *operation.outputs):
        found.fix(value, f"there is no rule of channels for the operation {operation.name}{where}")
