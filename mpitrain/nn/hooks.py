"""Hooks before and after a module's forward and backward, for sharded parameters, measurements and debugging.

Backward has no call per module, so its moments are found in the graph: a marker node on the module's outputs runs first
in its backward, and the pass has left the module when every node recorded since its entry is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, current_walk, grad_enabled
from mpitrain.errors import GraphError

Hook = Callable[..., None]


class Hooks:
    """The hooks of one module, in the order they were added."""

    def __init__(self) -> None:
        self.before_forward: list[Hook] = []
        self.after_forward: list[Hook] = []
        self.before_backward: list[Hook] = []
        self.after_backward: list[Hook] = []

    def call(self, module: object, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """``forward(*inputs, **named)``, which is what `module` computes, between its hooks."""
        for hook in self.before_forward:
            hook(module, inputs)
        watched = grad_enabled() and (self.before_backward or self.after_backward)
        entry = _now() if watched else 0
        output = forward(*inputs, **named)
        if watched:
            output = self._mark(module, output, entry)
        for hook in self.after_forward:
            hook(module, inputs, output)
        return output

    def _mark(self, module: object, output: Any, entry: int) -> Any:
        """`output` (a tensor, or tuples of tensors) with a marker node on top of those that carry a gradient."""
        tensors = [t for t in _flatten(output) if isinstance(t, Tensor) and t.requires_grad]
        if not tensors:
            return output

        def entered() -> None:
            walk = current_walk()                     # before the hooks: they are refused there as a whole
            for hook in self.before_backward:
                hook(module)
            walk.after(entry, left)

        def left() -> None:
            for hook in self.after_backward:
                hook(module)

        marked = Marker.apply(*tensors, entered=entered)
        for before, after in zip(tensors, marked):
            after.version = before.shared_version()
        return _replace(output, {id(before): after for before, after in zip(tensors, marked)})


class Marker(Function):
    """The identity, which says when backward comes by."""

    half = "any"
    recorded = False

    @staticmethod
    def forward(ctx: Context, *arrays: Any, entered: Callable[[], None]) -> tuple[Any, ...]:
        ctx.entered = entered
        return arrays

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> tuple[Any, ...]:
        ctx.entered()
        return grads

    @staticmethod
    def derivative(ctx: Context, *grads: Tensor) -> Any:
        raise GraphError("Marker: a module on the way has backward hooks (those with parameters in slices, for instance), which "
                         "run in Tensor.backward alone; grad with create_graph or retain_graph wants modules without them")


def _now() -> int:
    """A place in program order: nodes recorded later have higher numbers."""
    stamp = Marker.apply(Tensor(np.zeros(()), requires_grad=True), entered=lambda: None)
    node: Context = stamp[0].node
    return node.sequence


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, tuple) else [value]


def _replace(value: Any, by: dict[int, Tensor]) -> Any:
    return tuple(_replace(item, by) for item in value) if isinstance(value, tuple) else by.get(id(value), value)
