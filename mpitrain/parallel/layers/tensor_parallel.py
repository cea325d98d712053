"""Tensor parallelism: one layer on several ranks, each with a part of its parameters and of its work (axis tp of the mesh).

    column   y_r = x W_r' + b_r             each rank has some outputs          x is entered, y stays cut
    row      y = sum over r of x_r W_r'     each rank has some inputs           y leaves as a sum, then the bias is added once

A column followed by a row costs one all-reduce forward and one back (Shoeybi et al.: "Megatron-LM", 2019). With `sequence`, what
lies between such pairs is cut along the sequence, and the all-reduces become reduce-scatters and all-gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import array_module
from mpitrain.nn import ACTIVATIONS, Dropout, DropoutAdd, Embedding, Linear
from mpitrain.nn.across import Across
from mpitrain.nn.module import declared
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.index import check_indices
from mpitrain.parallel.layers.tensor_functions import Collect, Enter, Gather, Group, Leave, LoneGroup, Scatter
from mpitrain.placement.tensor_plan import Layer

LENGTH = 1                                                    # the dim of activations (B, L, D) that is cut along the sequence


def join_layer(layer: Layer, group: Group, sequence: bool) -> None:
    """Connects one cut layer with the ranks of `group`. Called by all of them, before memory is given."""
    module, style = layer.module, layer.style
    if isinstance(module, (Dropout, DropoutAdd)) and (sequence or style == "channels"):
        module.part = group.rank
    kind: type[Column] | None
    if style == "sequence":
        kind = AlongTheSequence if sequence and not isinstance(module, (Dropout, DropoutAdd)) else None
    elif style == "channels":
        kind = Channels if isinstance(module, Dropout) else None
    elif isinstance(module, Embedding):
        kind = RowsOfATable
    else:
        kind = {"row": Row, "gathered": Gathered}.get(style, Column)
    if kind is not None:
        module.across = kind(layer, group, sequence)


class Column(Across):
    """A layer that has some of the outputs and all of the inputs. The other classes here are variants of it."""

    lockstep, absent = True, "another rank's part of a layer (mesh.tp)"

    def __init__(self, layer: Layer, group: Group, sequence: bool):
        self.layer, self.module, self.path, self.group, self.sequence = layer, layer.module, layer.path, group, sequence
        further = layer.module.alike.values() if isinstance(layer.module, Linear) else ()
        self.whole = [name for name in further if "tp" not in vars(layer.module)[name].placement]

    def alone(self) -> Across:
        return type(self)(self.layer, LoneGroup(self.group.rank, self.group.size), self.sequence)

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        with self.entered(self.whole):
            return inner(self.into(x))

    @contextmanager
    def entered(self, names: Sequence[str]) -> Iterator[None]:
        """Has the ranks add up the gradients of these parameters of the layer, which all of them have."""
        attributes = vars(self.module)
        kept = {name: attributes[name] for name in names}
        try:
            attributes.update({name: Enter.apply(leaf, group=self.group, name=f"{self.path}.{name}")
                               for name, leaf in kept.items()})
            yield
        finally:
            attributes.update(kept)

    def into(self, x: Any) -> Any:
        if self.sequence:
            return Gather.apply(x, group=self.group, dim=LENGTH, name=self.path)
        return Enter.apply(x, group=self.group, name=self.path)

    def out(self, y: Tensor) -> Any:
        if self.sequence:
            return Scatter.apply(y, group=self.group, dim=LENGTH, name=self.path)
        return Leave.apply(y, group=self.group, name=self.path)


class Gathered(Column):
    """The outputs are put together on all ranks."""

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        dim = 1 if declared(self.module, "channel_dims") else -1
        return Collect.apply(super().forward(inner, x), group=self.group, dim=dim, name=self.path)


class Row(Column):
    """A layer that has some of the inputs: sums of products first, then bias and activation, once."""

    def __init__(self, layer: Layer, group: Group, sequence: bool):
        super().__init__(layer, group, sequence)
        self.bias: Parameter | None = vars(self.module).get("bias")
        self.channels = bool(declared(self.module, "channel_dims"))
        self.after: Callable[[Any], Any] | None = None
        if isinstance(self.module, Linear):
            self.after = ACTIVATIONS.resolve(self.module.fused)() if self.module.fused else self.module.after

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        m: Any = self.module
        if self.channels:
            with self.without_bias():
                y = self.out(inner(x))
        else:
            with self.entered(self.whole):
                y = self.out(m.products(x))
        if self.bias is not None:                             # With `sequence`, each rank adds it to some positions.
            added: Any = Enter.apply(self.bias, group=self.group, name=f"{self.path}.bias") if self.sequence else self.bias
            y = y + (ops.reshape(added, -1, *(1 for _ in y.shape[2:])) if self.channels else added)
        return y if self.after is None else self.after(y)

    @contextmanager
    def without_bias(self) -> Iterator[None]:
        attributes = vars(self.module)
        try:
            attributes.update({} if self.bias is None else {"bias": None})
            yield
        finally:
            attributes.update({} if self.bias is None else {"bias": self.bias})


class RowsOfATable(Column):
    """Each rank looks up the tokens whose rows it has, and has zeros for the others: their sum is exact."""

    def forward(self, inner: Callable[..., Any], indices: Any) -> Any:
        module: Any = self.module
        weight: Parameter = module.weight
        first, count = weight.offset[0], weight.shape[0]
        given = indices.array if isinstance(indices, Tensor) else indices
        xp = array_module(given)
        if xp is np:
            check_indices("embedding", given, self.layer.outputs)
        here = (given >= first) & (given < first + count)
        elsewhere = 0 if xp is np else xp.where((given >= 0) & (given < self.layer.outputs), 0, -1)      # NaN: see ops.embedding
        padding = None if module.padding_idx is None else module.padding_idx - first
        rows = module.rows(xp.where(here, given - first, elsewhere), padding if padding in range(count) else None)
        return self.out(rows * here[..., None].astype(weight.dtype))


class Channels(Column):
    """Dropout of numbers of which this rank has some: channels lie together in a sample, features in each of its rows."""

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        module: Any = self.module
        shape = tuple(x.shape)
        if len(shape) <= 2 or self.layer.cut == "channels" or not module.drops:
            return inner(x)
        between = math.prod(shape[2:-1])                      # rows (..., features) of each position, dim 1
        rows = (module.positions(shape[1])[:, None] * between + np.arange(between)).reshape(-1)
        y = ops.dropout(ops.reshape(x, shape[0], len(rows), shape[-1]), module.p, module.path,
                        positions=rows * self.group.size + self.group.rank)
        return ops.reshape(y, *shape)


class AlongTheSequence(Column):
    """A layer with whole parameters, which each rank runs for its own positions; the ranks add up the parameters' gradients."""

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if isinstance(self.module, Embedding):
            places = inputs[0].array if isinstance(inputs[0], Tensor) else inputs[0]
            inputs = (self.group.part(places, -1),)
        with self.entered([name for name, value in vars(self.module).items() if isinstance(value, Parameter)]):
            return inner(*inputs, **named)
