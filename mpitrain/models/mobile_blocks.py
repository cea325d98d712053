"""Blocks that the efficient convolutional nets share. Letters: `N` batch, `C` channels, `t` the factor of an expansion.

Images of ImageNet are halved five times. What is small from the start, such as 28 x 28, is halved less often: `halvings` of a
model says how often, and the first ones are left out, so that most of the net sees as many positions as its authors meant it to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.registry import require_sizes
from mpitrain.nn import AdaptiveAvgPool2d, ChannelShuffle, Conv2d, DropPath, Flatten, Module, SqueezeExcitation, init
from mpitrain.nn.basic import Check
from mpitrain.nn.norm import NORMS

HE = init.kaiming_normal(fan="out")
SMALL_NORMAL = init.normal(0.01)
INSIDE = {"expand.conv": "column", "expand.norm": "channels", "depthwise.conv": "channels", "depthwise.norm": "channels",
          "project.conv": "row"}
LAST = {"last.conv": "column", "last.norm": "channels", "dropout": "channels", "head": "row"}
GATED = {"squeeze.squeeze": "row", "squeeze.expand": "column"}
PUBLISHED = 5                                     # how often the images of ImageNet are halved


class ConvNorm(Module):
    """A convolution without bias that keeps the size (or divides it by `stride`), a norm of its channels, an activation.

    `residual`, of the result's shape, is added before the activation.
    """

    paths = ("conv", "norm"),

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, activation: str | None = None,
                 norm: Any = None):
        self.conv = Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False, weight_init=HE)
        self.norm = norm(outputs, activation=activation)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        y: Tensor = self.norm(self.conv(x), residual)
        return y


class InvertedResidual(Module):
    """1 x 1 to `inner` channels, a convolution of each channel by itself, 1 x 1 to `outputs` without activation (Sandler et al.
    2018), beside the input where that has the result's shape.

    Where `inner` is the number of inputs, the first convolution is left out unless `always`. `squeezed` numbers gate the inner
    channels (squeeze-and-excitation; None: no gate) by the function `gate`. The whole is left out for a sample with probability
    `drop_path`.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, kernel: int, stride: int, activation: str, norm: Any, *,
                 squeezed: int | None = None, squeeze_activation: str = "relu", gate: str = "sigmoid", drop_path: float = 0.0,
                 always: bool = False):
        self.expand: ConvNorm | None = None
        if always or inner != inputs:
            self.expand = ConvNorm(inputs, inner, 1, activation=activation, norm=norm)
        self.depthwise = ConvNorm(inner, inner, kernel, stride, inner, activation, norm)
        self.squeeze = None if squeezed is None else SqueezeExcitation(inner, squeezed, squeeze_activation, gate)
        self.project = ConvNorm(inner, outputs, 1, norm=norm)
        self.chains = [[name for name in ("expand", "depthwise", "squeeze", "project") if vars(self)[name] is not None]]
        self.around = stride == 1 and inputs == outputs
        self.drop_path = DropPath(drop_path) if self.around and drop_path else None

    def forward(self, x: Any) -> Tensor:
        y = self.depthwise(x if self.expand is None else self.expand(x))
        if self.squeeze is not None:
            y = self.squeeze(y)
        if self.drop_path is not None:
            return ops.add(x, self.drop_path(self.project(y)))
        out: Tensor = self.project(y, x if self.around else None)
        return out


class ShuffleUnit(Module):
    """Two branches side by side, whose channels then take turns (Ma et al. 2018).

    The first half of the channels goes round, the second through three convolutions. The `first` unit of a stage, which may
    have a stride, gives all inputs to both branches, and the first has two convolutions there.
    """

    chains = ("expand2", "depthwise2", "project2"),

    def __init__(self, inputs: int, outputs: int, stride: int, first: bool, norm: Any):
        half = self.half = outputs // 2
        self.depthwise1 = ConvNorm(inputs, inputs, 3, stride, inputs, None, norm) if first else None
        self.project1 = ConvNorm(inputs, half, 1, activation="relu", norm=norm) if first else None
        self.expand2 = ConvNorm(inputs if first else half, half, 1, activation="relu", norm=norm)
        self.depthwise2 = ConvNorm(half, half, 3, stride, half, None, norm)
        self.project2 = ConvNorm(half, half, 1, activation="relu", norm=norm)
        self.shuffle = ChannelShuffle(2)

    def forward(self, x: Any) -> Tensor:
        if self.depthwise1 is not None and self.project1 is not None:
            first, second = self.project1(self.depthwise1(x)), x
        else:
            first, second = ops.split(x, self.half, dim=1)
        y: Tensor = self.shuffle(ops.cat((first, self.project2(self.depthwise2(self.expand2(second)))), dim=1))
        return y


def plan_of(blocks: Iterable[tuple[str, Module]]) -> dict[str, str]:
    """How `mesh.tp` cuts inverted residuals: each rank has some of the inner channels. Those that do not expand are small."""
    plan: dict[str, str] = {}
    for name, block in blocks:
        if isinstance(block, InvertedResidual) and block.expand is not None:
            plan |= {f"{name}.{layer}": style for layer, style in INSIDE.items()}
            plan |= {f"{name}.{layer}": style for layer, style in GATED.items() if block.squeeze is not None}
    return plan


def pooling() -> list[tuple[str, Module]]:
    """The means of each channel of (N, C, H, W), as (N, C)."""
    return [("pool", AdaptiveAvgPool2d(1)), ("flatten", Flatten())]


def check_of(name: str, channels: int) -> tuple[str, Module]:
    """The first block: images (N, channels, H, W) of any size."""
    return "input", Check(name, (None, channels, None, None), "set model.channels")


def norm_of(norm: str, eps: float = 1e-5) -> Any:
    """What makes a norm from its channels and an activation; `norm` is "batch" or "sync"."""
    return partial(NORMS.resolve(norm), eps=eps)


def strides_of(strides: Sequence[int], halvings: int) -> list[int]:
    """`strides` with 1 for the first ones of 2, so that `halvings` of them are left. ConfigError where there are not as many."""
    require_sizes(halvings=halvings)
    there = sum(stride == 2 for stride in strides)
    if halvings > there:
        raise ConfigError(f"model.halvings must be at most {there}, found {halvings}; change model.halvings")
    found, without = list(strides), there - halvings
    for i, stride in enumerate(strides):
        if stride == 2 and without:
            found[i], without = 1, without - 1
    return found


def rounded(channels: float, unit: int = 8) -> int:
    """The multiple of `unit` nearest to a scaled number of channels, and the next one where that is more than a tenth less."""
    found = max(unit, int(channels + unit / 2) // unit * unit)
    return found + unit if found < 0.9 * channels else found


def repeated(count: int, factor: float) -> int:
    """Blocks of a stage that is `factor` times as deep, rounded up."""
    return math.ceil(count * factor)
