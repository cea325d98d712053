"""Norms of the gradients of single rows, out of one backward over many (Goodfellow, 2015; Li et al., 2021; Bu et al., 2022).

A backward in two halves stops between them: it has the gradients of all outputs, a row for each row of the batch, and not yet
those of parameters. A layer's input and output gradient give the norm of each row's gradient, mostly without making it:

    linear        |g a'|        = |g| |a|                              one position in a row
                  |sum g_t a_t'|^2 = sum over s, t of (g_s.g_t)(a_s.a_t)  many, where that is less than to make them
    convolution   the same of its windows
    embedding     |.|^2 = sum over s, t of (g_s.g_t) where s and t are the same entry of the table

Then each row of the output gradients is scaled, and the second half makes the sum of the clipped gradients as it makes any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain import nn as layers
from mpitrain.autograd.context import Context
from mpitrain.backend import Array
from mpitrain.errors import GraphError
from mpitrain.kernels.convolution import unfold
from mpitrain.nn import Flatten, Module, Sequential
from mpitrain.nn.activation import OfEach
from mpitrain.nn.basic import Check
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.index import Embedding
from mpitrain.ops.linalg import Linear

Deferred = list[tuple[Context, list[Array]]]                  # the nodes of the second half, with the gradients of their outputs
Squares = np.ndarray[Any, np.dtype[np.float64]]
ROOM = 4 << 20                                                # elements of gradients of single rows that are made at a time


def squared_norms(deferred: Deferred, rows: int) -> Squares:
    """(rows,): of each row's gradient, over all parameters. GraphError for what has no rule, or parameters used twice."""
    total = np.zeros(rows)
    seen: set[int] = set()
    for node, grads in deferred:
        for edge in node.edges:
            if getattr(edge, "is_parameter", False):
                if id(edge) in seen:
                    raise no_rule(f'the parameter "{edge.name}" is used twice')
                seen.add(id(edge))
        rule = RULES.get(node.function)
        if rule is None or len(grads) != 1 or len(grads[0]) != rows:
            raise no_rule(f"{node.function.__name__} has no rule for such inputs")
        total += rule(node, grads)
    return np.maximum(total, 0.0)                             # A zero as a sum of products may come out as -1e-30; NaN stays.


def suits(model: Module) -> bool:
    """Whether norms of rows follow from whole batches: all layers are ours and keep rows apart, those with parameters have a
    rule, and no parameter is used twice. Of a layer of the user's own nobody knows whether it does."""
    if any(p.twin_of for p in model.parameters()) or not all(_keeps_rows(layer) for _, layer in model.named_modules()):
        return False
    used = [id(p) for p in _uses(model)]
    return len(used) == len(set(used))


def _uses(model: Module) -> Iterator[Parameter]:
    """The parameters of a forward, once for each layer that uses them: a Sequential runs each of its blocks once, and the same
    layer as often as it stands there."""
    if isinstance(model, Sequential):
        for block in model:
            yield from _uses(block)
    else:
        yield from model.parameters()


def _keeps_rows(layer: Module) -> bool:
    kind = type(layer)
    if isinstance(layer, Flatten):
        return bool(layer.start >= 1)
    return kind in KNOWN or (kind.__module__.startswith("mpitrain.nn.") and isinstance(layer, OF_EACH)
                             and not list(layer.parameters()))


def scale_rows(deferred: Deferred, factors: Array) -> None:
    """Multiplies what the rows add to the gradients of parameters."""
    for node, grads in deferred:
        grads[0] = _times(grads[0], factors)
        before = getattr(node, "before", None)
        if before is not None:                                # a linear layer keeps the gradient of its product, and the bias's
            product = _times(before[0].reshape(len(factors), -1, before[0].shape[-1]), factors).reshape(before[0].shape)
            node.before = product, None if before[1] is None else product.sum(0)


def no_rule(what: str) -> GraphError:
    return GraphError(f"{what}, so that norms of rows do not follow from whole batches; set privacy.by_row = true")


def _times(grad: Array, factors: Array) -> Array:
    return grad * factors.astype(grad.dtype).reshape(len(factors), *(1,) * (grad.ndim - 1))


def _linear(node: Context, grads: list[Array]) -> Squares:
    x, _, *kept = node.saved
    flat = grads[0].reshape(-1, grads[0].shape[-1])
    if node.activation is not None and node.before is None:   # a first layer, whose backward has not run at all
        flat = node.activation.gradient(kept[0].reshape(flat.shape), flat, None)
        node.before = flat, None if node.edges[2] is None else flat.sum(0)
    if node.before is not None:
        flat = node.before[0]
    rows = len(x)
    return _products(x.reshape(rows, -1, x.shape[-1]), flat.reshape(rows, -1, flat.shape[-1]), node.edges[2] is not None,
                     node.edges[1] is not None)


def _convolution(node: Context, grads: list[Array]) -> Squares:
    x, _ = node.saved
    rows, outputs = grads[0].shape[:2]
    total: Squares = np.zeros(rows)
    for part in _parts(rows, x.shape[1] * int(np.prod(node.window.kernel)) * int(np.prod(grads[0].shape[2:]))):
        columns, grad = unfold(x[part], node.window), grads[0][part]
        n, groups = len(grad), node.groups
        a = columns.reshape(n * groups, columns.shape[1] // groups, -1).swapaxes(1, 2)
        g = grad.reshape(n * groups, outputs // groups, -1).swapaxes(1, 2)
        total[part] = _products(a, g, node.edges[2] is not None, node.edges[1] is not None).reshape(n, groups).sum(1)
    return total


def _embedding(node: Context, grads: list[Array]) -> Squares:
    indices, = node.saved
    rows = len(indices)
    indices, grad = indices.reshape(rows, -1), grads[0].reshape(rows, -1, grads[0].shape[-1])
    total = np.zeros(rows)
    for part in _parts(rows, indices.shape[1] ** 2):
        same = indices[part, :, None] == indices[part, None, :]
        total[part] = ((grad[part] @ grad[part].swapaxes(1, 2)) * same).sum((1, 2), dtype=np.float64)
    return total


def _products(a: Array, g: Array, bias: bool, weight: bool) -> Squares:
    """Squared norms of sum over t of g_t a_t', and of sum g_t: a (B, T, I), g (B, T, O)."""
    (rows, t, inputs), outputs = a.shape, g.shape[2]
    total = np.zeros(rows)
    if bias:
        total += (g.sum(1) ** 2).sum(1, dtype=np.float64)
    if not weight:
        return total
    if t == 1:
        total += (a[:, 0] ** 2).sum(1, dtype=np.float64) * (g[:, 0] ** 2).sum(1, dtype=np.float64)
        return total
    by_pairs = t * (inputs + outputs) < inputs * outputs
    for part in _parts(rows, t * t if by_pairs else inputs * outputs):
        if by_pairs:
            made = (a[part] @ a[part].swapaxes(1, 2)) * (g[part] @ g[part].swapaxes(1, 2))
        else:
            made = (g[part].swapaxes(1, 2) @ a[part]) ** 2
        total[part] += made.sum((1, 2), dtype=np.float64)
    return total


def _parts(rows: int, each: int) -> Sequence[slice]:
    step = max(1, ROOM // max(1, each))
    return [slice(start, start + step) for start in range(0, rows, step)]


KNOWN = (Sequential, Check, layers.Linear, layers.Conv2d, layers.Embedding, layers.Dropout)
OF_EACH = (OfEach, layers.MaxPool1d, layers.MaxPool2d, layers.AvgPool1d, layers.AvgPool2d, layers.AdaptiveAvgPool2d)
RULES: dict[Any, Callable[[Context, list[Array]], Squares]] = {Linear: _linear, Conv2d: _convolution, Embedding: _embedding}
