"""Layers of which a part can be used: the weights of many networks in one (a supernet).

    a choice        one number of a few: the width of a block, the size of its kernel, how many blocks a stage has
    a path          a number for each choice, by name: one of the networks
    an elastic layer takes the first outputs and inputs of its weight that its choices say, and the middle of its kernel

        weight (outputs, inputs)        outputs 16 or 32        the path of 16:  weight[:16]

The weights of a small network are then a part of those of each larger one (Cai et al. 2020, "Once-for-all", 1908.09791), and one
training step along one path trains that network alone (Guo et al. 2020, 1904.00420). What the path does not use takes no part in
the forward pass, and its gradient is zero: an optimizer that is to leave it alone is told what was used (`in_use`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.nn.basic import Linear
from mpitrain.nn.choices import Choice, Size, largest_of, value_of
from mpitrain.nn.conv import Conv2d
from mpitrain.nn.module import Module
from mpitrain.nn.norm import BatchNorm2d
from mpitrain.ops.index import part

Index = tuple[np.ndarray[Any, Any], ...]          # for each dim of an array, which of its places are used


def places(size: Size, groups: int = 1, unit: int = 1) -> np.ndarray[Any, Any]:
    """The places in a dim that are used: the first ones of each of its groups, `unit` for each that is counted."""
    each = np.arange(value_of(size) * unit)
    return (np.arange(groups)[:, None] * largest_of(size) * unit + each).reshape(-1)


def middle(kernel: Size) -> np.ndarray[Any, Any]:
    """The places of a smaller kernel in the largest one."""
    around = (largest_of(kernel) - value_of(kernel)) // 2
    return np.arange(around, around + value_of(kernel))


class ElasticLayer(Module):
    """A layer that says which places of its parameters and buffers it uses, by their attributes' names."""

    def used(self) -> Mapping[str, Index]:
        raise NotImplementedError


class ElasticLinear(Linear, ElasticLayer):
    """Linear of the first inputs and outputs; of each of `groups` of outputs, and `out_unit` or `in_unit` for each counted."""

    def __init__(self, inputs: Size, outputs: Size, bias: bool = True, *, groups: int = 1, in_unit: int = 1, out_unit: int = 1,
                 **more: Any):
        self.inputs, self.outputs, self.groups, self.in_unit, self.out_unit = inputs, outputs, groups, in_unit, out_unit
        super().__init__(largest_of(inputs) * in_unit, groups * largest_of(outputs) * out_unit, bias, **more)

    def used(self) -> Mapping[str, Index]:
        rows = places(self.outputs, self.groups, self.out_unit)
        return {"weight": (rows, places(self.inputs, 1, self.in_unit)), "bias": (rows,)}

    def forward(self, x: Any) -> Tensor:
        o, i = value_of(self.outputs) * self.out_unit, value_of(self.inputs) * self.in_unit
        weight, bias = self._rows(self.weight, o, i), None if self.bias is None else self._rows(self.bias, o)
        y = ops.linear(x, weight, bias, self.fused, operands=self.weight.operands)
        return y if self.after is None else self.after(y)

    def _rows(self, leaf: Any, outputs: int, *inputs: int) -> Any:
        """The first outputs of each group of a parameter, and the first inputs."""
        if self.groups == 1:
            return some(leaf, outputs, *inputs)
        whole = ops.reshape(leaf, self.groups, leaf.shape[0] // self.groups, *leaf.shape[1:])
        used = some(whole, self.groups, outputs, *inputs)
        return leaf if used is whole else ops.reshape(used, self.groups * outputs, *used.shape[2:])


class ElasticConv2d(Conv2d, ElasticLayer):
    """Conv2d of the first inputs and outputs and the middle of the kernel, which pads by half of it."""

    def __init__(self, inputs: Size, outputs: Size, kernel: Size, **more: Any):
        self.inputs, self.outputs, self.kernel = inputs, outputs, kernel
        super().__init__(largest_of(inputs), largest_of(outputs), largest_of(kernel), padding=largest_of(kernel) // 2, **more)

    def used(self) -> Mapping[str, Index]:
        rows = places(self.outputs)
        return {"weight": (rows, places(self.inputs), middle(self.kernel), middle(self.kernel)), "bias": (rows,)}

    def forward(self, x: Any) -> Tensor:
        o, i, k = value_of(self.outputs), value_of(self.inputs), value_of(self.kernel)
        around = (largest_of(self.kernel) - k) // 2
        inside = slice(around, around + k)
        weight: Any = self.weight
        if (o, i, k) != self.weight.shape[:3]:
            weight = part(self.weight, (slice(o), slice(i), inside, inside))
        bias = None if self.bias is None else some(self.bias, o)
        return ops.conv2d(x, weight, bias, stride=self.stride, padding=k // 2, operands=self.weight.operands)


class ElasticBatchNorm2d(BatchNorm2d, ElasticLayer):
    """BatchNorm2d of the first channels. The running statistics are those of one path: training, whose paths change, leaves
    them alone, and whoever evaluates a path has them measured for it (`calibrating`)."""

    calibrating = False

    def __init__(self, features: Size, **more: Any):
        self.channels = features
        super().__init__(largest_of(features), **more)

    def used(self) -> Mapping[str, Index]:
        rows = places(self.channels)
        return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (rows,))

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        c = value_of(self.channels)
        weight, bias = some(self.weight, c), some(self.bias, c)
        if not (self.training or self.calibrating):
            y = ops.batch_norm_inference(x, self.running_mean.array[:c], self.running_var.array[:c], weight, bias,
                                         residual=residual, eps=self.eps, activation=self.fused)
        else:
            y, mean, var, count = ops.batch_norm(x, weight, bias, residual=residual, eps=self.eps, activation=self.fused)
            if self.calibrating and self.running is not None:
                self.running.record(self._all(mean, 0.0), self._all(var * (count / (count - 1)), 1.0))
        return y if self.after is None else self.after(y)

    def _all(self, values: Any, rest: float) -> Any:
        """Values of the channels in use, and `rest` for the others."""
        whole = self.running_mean.xp.full(self.running_mean.shape, rest, values.dtype)
        whole[:len(values)] = values
        return whole


def some(leaf: Any, *sizes: int) -> Any:
    """The first `sizes` of each dim of a tensor, as an array of its own; the tensor itself where that is all of it."""
    return leaf if tuple(sizes) == tuple(leaf.shape[:len(sizes)]) else part(leaf, tuple(slice(n) for n in sizes))


class ElasticBlock(Module):
    """A block of a stage, of which the first so many are used as the choice `depth` says; another gives its input back.

    A subclass defines `compute`, and takes and gives arrays of one shape wherever its block may be left out.
    """

    depth: Choice | None = None
    place = 0

    def forward(self, x: Any) -> Any:
        return self.compute(x) if self.is_used else x

    def compute(self, x: Any) -> Any:
        raise NotImplementedError

    @property
    def is_used(self) -> bool:
        return self.depth is None or self.place < self.depth.value


def in_use(model: Module) -> dict[str, Index | None]:
    """What the path that is in use takes of each parameter and buffer, by name, in a model that is not cut: places in each dim,
    None: all. Those that are not there take no part."""
    found: dict[str, Index | None] = dict.fromkeys(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    for name, module in model.named_modules():
        if isinstance(module, ElasticLayer):
            for leaf, index in module.used().items():
                if f"{name}.{leaf}" in found:
                    found[f"{name}.{leaf}"] = index
        elif isinstance(module, ElasticBlock) and not module.is_used:
            found = {leaf: index for leaf, index in found.items() if not leaf.startswith(f"{name}.")}
    return found
