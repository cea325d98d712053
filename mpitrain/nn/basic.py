"""Layers without structure: linear, embedding, dropout, flatten. Letters: `B` batch, `I` inputs, `O` outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module, Places
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.linalg import FUSED_ACTIVATIONS

__all__ = ["Dropout", "DropoutAdd", "Embedding", "Flatten", "Linear"]


class Linear(Module):
    """(..., I) to (..., O): x @ weight.T + bias, with weight (O, I). Initial values are PyTorch's.

    `activation` is the name of one that follows (see `nn.ACTIVATIONS`): most are then computed in the same pass. Where outputs
    or inputs are cut over ranks, units of `out_unit` or `in_unit` of them stay whole, and each of `out_groups` is cut alike. A
    subclass with further parameters (`alike`) says which one has outputs along dim 0, and which one inputs along dim 1.
    """

    out_groups = out_unit = in_unit = 1
    alike: Mapping[int, str] = MappingProxyType({})       # dim of the weight -> the parameter that is cut along it as well
    by_position = True

    def __init__(self, inputs: int, outputs: int, bias: bool = True, *, activation: str | None = None,
                 weight_init: Initialiser = init.default_weight, bias_init: Initialiser | None = None):
        self.fused = activation if activation in FUSED_ACTIVATIONS else None
        self.after = None if activation == self.fused else ACTIVATIONS.resolve(str(activation))()
        self.weight = Parameter((outputs, inputs), weight_init)
        self.bias = Parameter((outputs,), bias_init or init.fan_in_uniform((outputs, inputs))) if bias else None

    @classmethod
    def instead_of(cls, layer: Linear, **more: Any) -> Self:
        """A layer of this class that takes the place of `layer`, with its parameters, and with the attributes `more`."""
        made = object.__new__(cls)
        vars(made).update(vars(layer), **more)
        return made

    def forward(self, x: Any) -> Tensor:
        y = ops.linear(x, self.weight, self.bias, self.fused)
        return y if self.after is None else self.after(y)

    def products(self, x: Any) -> Tensor:
        """x @ weight.T, without bias and activation: what ranks that have some of the inputs each add up."""
        return ops.linear(x, self.weight)


class Embedding(Module):
    """Integers (...) in [0, count) to rows (..., width) of the weight (count, width), which starts standard normal.

    The row `padding_idx` starts as zeros and gets no gradient. With `max_norm`, rows that are looked up and whose
    `norm_type`-norm is larger are scaled to it in the weight itself, as in PyTorch. A run does so once a step, before the
    update, for the rows that any rank has looked up in training; until then they come out scaled, and gradients are those of
    the scaled row.
    """

    used: Callable[[Any], None] | None = None     # told of the indices of a forward, where a run scales rows
    by_position = True

    def __init__(self, count: int, width: int, *, padding_idx: int | None = None, max_norm: float | None = None,
                 norm_type: float = 2.0, weight_init: Initialiser | None = None):
        if padding_idx is not None and not -count <= padding_idx < count:
            raise ShapeError(f"Embedding: padding_idx is {padding_idx}, expected one of {count} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % count
        self.max_norm, self.norm_type = max_norm, norm_type
        values = weight_init or init.normal(1.0)
        if self.padding_idx is not None:
            values = init.without_row(values, self.padding_idx)
        self.weight = Parameter((count, width), values)

    def forward(self, indices: Any) -> Tensor:
        return self.rows(indices, self.padding_idx)

    def rows(self, indices: Any, padding_idx: int | None) -> Tensor:
        """The rows of the weight that is here, in which `padding_idx` is the one without a gradient."""
        rows = ops.embedding(indices, self.weight)
        if padding_idx is None and self.max_norm is None:
            return rows
        plain = indices.array if isinstance(indices, Tensor) else indices
        if self.max_norm is not None and self.used is None:
            if self.scale_rows(rows.xp.unique(plain)):
                rows = ops.embedding(indices, self.weight)
        elif self.used is not None and self.training:
            self.used(plain)
        xp, values = rows.xp, rows.array
        if self.max_norm is not None and self.used is not None:
            values = self.scaled(values, xp)
            rows = rows + (values - rows.array)
        if padding_idx is not None:
            rows = ops.where(ops.expand_dims(ops.equal(plain, padding_idx), -1), values, rows)
        return rows

    def scaled(self, values: Array, xp: Any) -> Array:
        """Rows (..., width), those longer than `max_norm` scaled to it."""
        assert self.max_norm is not None
        norms = xp.linalg.norm(values, self.norm_type, axis=-1, keepdims=True)
        over = norms > self.max_norm
        return xp.where(over, values * (self.max_norm / (xp.where(over, norms, 1) + 1e-7)), values)

    def scale_rows(self, which: Array) -> bool:
        """Scales those rows of the weight, each number once, that are longer than `max_norm`; whether there were any."""
        values = self.weight.master[which]
        new = self.scaled(values, self.weight.xp)
        if changed := bool((new != values).any()):
            self.weight.master[which] = new
            self.weight.round()
            self.weight.mark_changed()
        return changed


def probability(p: float) -> float:
    """`p`, with which elements are dropped. ShapeError where it is no number in [0, 1)."""
    if not isinstance(p, (int, float, np.number)) or not 0.0 <= p < 1.0:
        raise ShapeError(f"the probability of dropout lies in [0, 1), not {p!r}")
    return p


class _Dropping(Module):
    """In training, zeroes each element with probability p and scales the others by 1/(1-p).

    The mask is a function of (seed, step, sample, this layer's name): see `backend.random`. Where its input is a part of each
    sample, of parts of one size, `part` is the number of that part, and the mask that part of the whole's.
    """

    part = 0

    def __init__(self, p: float = 0.5):
        self.p = probability(p)
        self.by_element = p == 0.0

    @property
    def drops(self) -> bool:
        """True where the layer drops elements: in training, with p above 0."""
        return self.training and self.p > 0.0

    def places(self, x: Any) -> Places | None:
        """The positions (L,) of x (B, L, ...) in its samples, where this rank has some of them; else None."""
        return None if self.spread is None else self.spread(x.shape[1])


class Dropout(_Dropping):
    """Dropout of the input."""

    by_position = True

    def forward(self, x: Any) -> Any:
        return ops.dropout(x, self.p, self.path, part=self.part, positions=self.places(x)) if self.drops else x


class DropoutAdd(_Dropping):
    """residual + dropout(x), in one pass over memory."""

    by_position = True

    def forward(self, x: Any, residual: Any) -> Any:
        if not self.drops:
            return ops.add(residual, x)
        return ops.dropout(x, self.p, self.path, residual, part=self.part, positions=self.places(x))


class Flatten(Module):
    """Dims `start` to `end` as one: (B, ...) to (B, I) by default. ShapeError where its size is not `inputs`, if given."""

    def __init__(self, inputs: int | None = None, start: int = 1, end: int = -1):
        self.inputs, self.start, self.end = inputs, start, end
        self.by_channel = (start, end) == (1, -1)     # A channel's numbers lie together then.

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if (self.start, self.end) == (1, -1) and shape:
            first, last = 1, len(shape)
        else:
            dims = max(len(shape), 1)
            if not (-dims <= self.start < dims and -dims <= self.end < dims and self.start % dims <= self.end % dims):
                raise ShapeError(f"Flatten: no dims {self.start} to {self.end} in an input of shape {shape}")
            first, last = self.start % dims, self.end % dims + 1
        size = math.prod(shape[first:last])
        if self.inputs is not None and size != self.inputs:
            raise ShapeError(f"the model expects {self.inputs} numbers a sample, the input of shape {shape} has "
                             f"{size}; change model.inputs or the data")
        return ops.reshape(x, *shape[:first], size, *shape[last:])


class Check(Module):
    """Passes its input on, if its dims are the expected ones; None stands for any size. `what` is named in the error."""

    by_position = True

    def __init__(self, what: str, shape: Sequence[int | None], change: str):
        self.what, self.shape, self.change = what, tuple(shape), change

    def forward(self, x: Any) -> Any:
        given = tuple(x.shape)
        if len(given) != len(self.shape) or any(e is not None and e != n for e, n in zip(self.shape, given)):
            wanted = ", ".join("any" if n is None else str(n) for n in self.shape)
            raise ShapeError(f"{self.what} expects input of shape ({wanted}), got {given}; {self.change}")
        return x
