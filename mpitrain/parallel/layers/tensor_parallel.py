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
from mpitrain.nn import ACTIVATIONS, Conv2d, Dropout, DropoutAdd, Embedding, Linear, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.index import check_indices
from mpitrain.parallel.layers.tensor_functions import Group, collect, enter, gather, leave, scatter
from mpitrain.parallel.layers.tensor_loss import CutLoss, largest
from mpitrain.placement.tensor_plan import Layer

LENGTH = 1                                                    # the dim of activations (B, L, D) that is cut along the sequence


class TensorParallel:
    """Layers of which each rank of `group` has a part; the outputs of `head` stay cut. Made by all of them, before memory is
    given."""

    def __init__(self, layers: Sequence[Layer], group: Group, *, sequence: bool, head: Layer | None):
        self.group, self._head = group, head
        for layer in layers:
            vars(layer.module)["forward"] = connected(layer, group, sequence)

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


def connected(layer: Layer, group: Group, sequence: bool) -> Callable[..., Any]:
    """What a layer that is cut computes, in the place of its `forward`."""
    module, path = layer.module, layer.path
    inner: Callable[..., Any] = module.forward

    def into(x: Any) -> Tensor:
        return gather(x, group, LENGTH, path) if sequence else enter(x, group, path)

    def out(y: Tensor) -> Tensor:
        return scatter(y, group, LENGTH, path) if sequence else leave(y, group, path)

    if layer.style == "sequence":
        return _along_the_sequence(module, path, group) if sequence else inner
    if layer.style == "channels":
        return _of_channels(module, path, group) if isinstance(module, Dropout) else inner
    if layer.style == "row":
        return _row(module, path, group, out, sequence)
    if isinstance(module, Embedding):
        return _rows_of_a_table(layer, out)
    if layer.style == "gathered":
        return lambda x: collect(inner(into(x)), group, 1 if isinstance(module, Conv2d) else -1, path)
    return lambda x: inner(into(x))


def _row(module: Module, path: str, group: Group, out: Callable[[Tensor], Tensor], sequence: bool) -> Callable[..., Tensor]:
    """Sums of products first, then bias and activation, once."""
    weight: Parameter = vars(module)["weight"]
    bias: Parameter | None = vars(module)["bias"]
    after: Callable[[Any], Any] | None = None
    if isinstance(module, Linear):
        after = ACTIVATIONS.resolve(module.fused)() if module.fused else module.after

    def forward(x: Any) -> Tensor:
        if isinstance(module, Conv2d):
            y = out(ops.conv2d(x, weight, None, stride=module.stride, padding=module.padding, dilation=module.dilation))
        else:
            y = out(ops.linear(x, weight))
        if bias is not None:
            added: Any = enter(bias, group, f"{path}.bias") if sequence else bias      # each rank has some of the positions
            y = y + (ops.reshape(added, 1, -1, 1, 1) if isinstance(module, Conv2d) else added)
        return y if after is None else after(y)
    return forward


def _rows_of_a_table(layer: Layer, out: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Each rank looks up the tokens whose rows it has, and has zeros for the others: their sum is exact."""
    weight: Parameter = vars(layer.module)["weight"]
    first, count, whole = weight.offset[0], weight.shape[0], layer.outputs

    def forward(indices: Any) -> Tensor:
        given = indices.array if isinstance(indices, Tensor) else indices
        check_indices("embedding", given, whole)
        here = (given >= first) & (given < first + count)
        xp = array_module(given)
        return out(ops.embedding(xp.where(here, given - first, 0), weight) * here[..., None].astype(weight.dtype))
    return forward


def _of_channels(module: Dropout, path: str, group: Group) -> Callable[..., Any]:
    """Dropout of this rank's channels: they lie together in a sample where they are its first dim."""
    inner: Callable[..., Any] = module.forward
    module.part = group.rank

    def forward(x: Any) -> Any:
        if len(x.shape) == 3:
            raise ConfigError(f'mesh.plan: "{path}" is "channels", which for a Dropout is about (B, features) or (B, channels, '
                             f"H, W), found {tuple(x.shape)}; let the dropout follow a \"row\" layer")
        return inner(x)
    return forward


def _along_the_sequence(module: Module, path: str, group: Group) -> Callable[..., Any]:
    """What each rank does for its own positions: parameters are whole, their gradients are what the ranks' positions give."""
    inner: Callable[..., Any] = module.forward
    if isinstance(module, (Dropout, DropoutAdd)):
        module.part = group.rank
        return inner
    own = [name for name, value in vars(module).items() if isinstance(value, Parameter)]

    def forward(*inputs: Any, **named: Any) -> Any:
        if isinstance(module, Embedding):
            places = inputs[0].array if isinstance(inputs[0], Tensor) else inputs[0]
            inputs = (group.part(places, -1),)
        attributes = vars(module)
        kept = {name: attributes[name] for name in own}
        try:
            attributes.update({name: enter(leaf, group, f"{path}.{name}") for name, leaf in kept.items()})
            return inner(*inputs, **named)
        finally:
            attributes.update(kept)
    return forward
