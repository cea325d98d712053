"""Tensor parallelism: one layer on several ranks, each with a part of its parameters and of its work (axis tp of the mesh).

    column   y_r = x W_r' + b_r             each rank has some outputs          x is entered, y stays cut
    row      y = sum over r of x_r W_r'     each rank has some inputs           y leaves as a sum, then the bias is added once

A column followed by a row costs one all-reduce forward and one back (Shoeybi et al.: "Megatron-LM", 2019). With `sequence`, what
lies between such pairs is cut along the sequence, and the all-reduces become reduce-scatters and all-gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import array_module
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.nn import ACTIVATIONS, Conv2d, Dropout, DropoutAdd, Embedding, Linear
from mpitrain.nn.across import Across
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.index import check_indices
from mpitrain.parallel.layers.tensor_functions import Group, LoneGroup, collect, enter, gather, leave, scatter
from mpitrain.parallel.layers.tensor_loss import CutLoss, largest
from mpitrain.placement.tensor_plan import Layer

LENGTH = 1                                                    # the dim of activations (B, L, D) that is cut along the sequence


class TensorParallel:
    """Layers of which each rank of `group` has a part; the outputs of `head` stay cut. Made by all of them, before memory is
    given."""

    def __init__(self, layers: Sequence[Layer], group: Group, *, sequence: bool, head: Layer | None):
        self.group, self._head = group, head
        for layer in layers:
            connect(layer, group, sequence)

    @property
    def messages(self) -> Channel:
        """The channel of the ranks that share layers."""
        return self.group.messages

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the model's output, of which a rank has `shape`."""
        return tuple(shape) if self._head is None else (*shape[:-1], self._head.outputs)

    def loss(self, loss: Any) -> Any:
        """The loss of outputs as they are here. ConfigError where it wants all of what is cut."""
        if self._head is None:
            return loss
        weight: Parameter = vars(self._head.module)["weight"]
        return CutLoss(loss, self.group, weight.offset[0], self._head.outputs, self._head.path)

    def classes(self, output: Any) -> Any:
        """The class of the largest output of each row; it communicates where they are cut."""
        if self._head is None:
            return array_module(output).argmax(output, axis=-1)
        return largest(output, self.group, vars(self._head.module)["weight"].offset[0])


def connect(layer: Layer, group: Group, sequence: bool) -> None:
    """Gives a layer that is cut what it asks of the group."""
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
    """A layer that has some of the outputs, and all of the inputs; the others here differ from it in what is said of them."""

    lockstep, absent = True, "another rank's part of a layer (mesh.tp)"

    def __init__(self, layer: Layer, group: Group, sequence: bool):
        self.layer, self.module, self.path, self.group, self.sequence = layer, layer.module, layer.path, group, sequence

    def alone(self) -> Across:
        return type(self)(self.layer, LoneGroup(self.group.rank, self.group.size), self.sequence)

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        return inner(self.into(x))

    def into(self, x: Any) -> Tensor:
        return gather(x, self.group, LENGTH, self.path) if self.sequence else enter(x, self.group, self.path)

    def out(self, y: Tensor) -> Tensor:
        return scatter(y, self.group, LENGTH, self.path) if self.sequence else leave(y, self.group, self.path)


class Gathered(Column):
    """The outputs are put together on all ranks."""

    def forward(self, inner: Callable[..., Any], x: Any) -> Tensor:
        dim = 1 if isinstance(self.module, Conv2d) else -1
        return collect(super().forward(inner, x), self.group, dim, self.path)


class Row(Column):
    """A layer that has some of the inputs: sums of products first, then bias and activation, once."""

    def __init__(self, layer: Layer, group: Group, sequence: bool):
        super().__init__(layer, group, sequence)
        self.weight: Parameter = vars(self.module)["weight"]
        self.bias: Parameter | None = vars(self.module)["bias"]
        self.after: Callable[[Any], Any] | None = None
        if isinstance(self.module, Linear):
            self.after = ACTIVATIONS.resolve(self.module.fused)() if self.module.fused else self.module.after

    def forward(self, inner: Callable[..., Any], x: Any) -> Tensor:
        m = self.module
        if isinstance(m, Conv2d):
            y = self.out(ops.conv2d(x, self.weight, None, stride=m.stride, padding=m.padding, dilation=m.dilation))
        else:
            y = self.out(ops.linear(x, self.weight))
        if self.bias is not None:                             # with `sequence` each rank adds it to some of the positions
            added: Any = enter(self.bias, self.group, f"{self.path}.bias") if self.sequence else self.bias
            y = y + (ops.reshape(added, 1, -1, 1, 1) if isinstance(m, Conv2d) else added)
        return y if self.after is None else self.after(y)


class RowsOfATable(Column):
    """Each rank looks up the tokens whose rows it has, and has zeros for the others: their sum is exact."""

    def forward(self, inner: Callable[..., Any], indices: Any) -> Tensor:
        weight: Parameter = vars(self.module)["weight"]
        first, count = weight.offset[0], weight.shape[0]
        given = indices.array if isinstance(indices, Tensor) else indices
        check_indices("embedding", given, self.layer.outputs)
        here = (given >= first) & (given < first + count)
        xp = array_module(given)
        return self.out(ops.embedding(xp.where(here, given - first, 0), weight) * here[..., None].astype(weight.dtype))


class Channels(Column):
    """Dropout of this rank's channels: they lie together in a sample where they are its first dim."""

    def forward(self, inner: Callable[..., Any], x: Any) -> Any:
        if len(x.shape) == 3:
            raise ConfigError(f'mesh.plan: "{self.path}" is "channels", which for a Dropout is about (B, features) or (B, '
                             f"channels, H, W), found {tuple(x.shape)}; let the dropout follow a \"row\" layer")
        return inner(x)


class AlongTheSequence(Column):
    """What each rank does for its own positions: parameters are whole, their gradients are what the ranks' positions give."""

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if isinstance(self.module, Embedding):
            places = inputs[0].array if isinstance(inputs[0], Tensor) else inputs[0]
            inputs = (self.group.part(places, -1),)
        attributes = vars(self.module)
        kept = {name: value for name, value in attributes.items() if isinstance(value, Parameter)}
        try:
            attributes.update({name: enter(leaf, self.group, f"{self.path}.{name}") for name, leaf in kept.items()})
            return inner(*inputs, **named)
        finally:
            attributes.update(kept)
