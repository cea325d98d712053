"""Convolutional models of series (B, L, I): TCN, FCN and InceptionTime.

Letters: `B` batch, `L` length, `I` inputs, `C` channels. The first block turns samples to (B, C, L), which convolutions take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.registry import of_positions, require_list_of_sizes, require_sizes
from mpitrain.nn import init
from mpitrain.nn.basic import Check

TCN_INIT = init.normal(0.01)
RESIDUAL_EVERY = 3                                # InceptionTime's modules between two shortcuts


class ChannelsFirst(nn.Module):
    """(B, L, I) to (B, I, L)."""

    def __init__(self, what: str, inputs: int):
        self.check = Check(what, (None, None, inputs), "set model.inputs")

    def forward(self, x: Any) -> Tensor:
        return ops.swapaxes(self.check(x), 1, 2)


class Causal(nn.Module):
    """A convolution of which no output sees a later input: zeros stand before the series, and none after it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int, weight_norm: bool):
        conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, weight_init=TCN_INIT)
        self.before = (kernel - 1) * dilation
        self.conv = nn.weight_norm(conv) if weight_norm else conv

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.conv(ops.pad(x, [(0, 0), (0, 0), (self.before, 0)]) if self.before else x)
        return y


class Temporal(nn.Module):
    """relu(x + f(x)), f twice a causal convolution, ReLU and dropout; 1 x 1 convolutions change the channels of x."""

    chains = ("conv1.conv", "dropout1", "conv2.conv"),

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int, dropout: float, weight_norm: bool):
        self.conv1 = Causal(inputs, outputs, kernel, dilation, weight_norm)
        self.dropout1 = nn.Dropout(dropout)
        self.conv2 = Causal(outputs, outputs, kernel, dilation, weight_norm)
        self.dropout2 = nn.Dropout(dropout)
        self.shortcut = nn.Conv1d(inputs, outputs, 1, weight_init=TCN_INIT) if inputs != outputs else None

    def forward(self, x: Any) -> Tensor:
        y = self.dropout1(ops.relu(self.conv1(x)))
        y = self.dropout2(ops.relu(self.conv2(y)))
        return ops.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Last(nn.Module):
    """(B, C, L) to (B, C): the last position."""

    def forward(self, x: Any) -> Tensor:
        return ops.getitem(x, (slice(None), slice(None), -1))


@of_positions
def tcn(inputs: int, channels: Sequence[int], outputs: int, kernel: int = 3, dropout: float = 0.0, weight_norm: bool = True
        ) -> nn.Sequential:
    """Temporal convolutional network (Bai, Kolter and Koltun 2018): a residual block for each of `channels`.

    Block i has dilation 2^i, so the last position, which the head sees, looks 1 + 2 (kernel - 1) (2^blocks - 1) steps back.
    """
    require_sizes(inputs=inputs, outputs=outputs, kernel=kernel)
    require_list_of_sizes("channels", channels)
    if not channels:
        raise ConfigError("tcn: model.channels is empty, expected the channels of one block or more, such as [32, 32]")
    widths = [inputs, *channels]
    model = nn.Sequential(
        ("input", ChannelsFirst("tcn", inputs)),
        *((f"block{i}", Temporal(width, following, kernel, 2 ** i, dropout, weight_norm))
          for i, (width, following) in enumerate(zip(widths, channels))),
        ("last", Last()), ("head", nn.Linear(widths[-1], outputs, weight_init=TCN_INIT)))
    if not weight_norm:                               # A weight that is computed of others is not cut.
        model.plan = {"block*.conv1.conv": "column", "block*.dropout1": "channels", "block*.conv2.conv": "row"}
    return model


class Mean(nn.Module):
    """(B, C, L) to (B, C): means over the series."""

    def forward(self, x: Any) -> Tensor:
        return ops.mean(x, dim=-1)


@of_positions
def fcn(inputs: int, outputs: int, channels: Sequence[int] = (128, 256, 128), kernels: Sequence[int] = (8, 5, 3)
        ) -> nn.Sequential:
    """Fully convolutional network for series (Wang, Yan and Oates 2017): convolutions with batch norm and ReLU, then the mean.

    It takes series of any length.
    """
    require_sizes(inputs=inputs, outputs=outputs)
    require_list_of_sizes("channels", channels)
    require_list_of_sizes("kernels", kernels, len(channels))
    widths, blocks = [inputs, *channels], []
    for i, (kernel, width) in enumerate(zip(kernels, channels)):
        blocks.append((f"block{i}", nn.Sequential(("conv", nn.Conv1d(widths[i], width, kernel, padding="same")),
                                                  ("norm", nn.BatchNorm1d(width, activation="relu")))))
    model = nn.Sequential(("input", ChannelsFirst("fcn", inputs)), *blocks, ("mean", Mean()),
                          ("head", nn.Linear(widths[-1], outputs)))
    for second in range(len(channels) - 1, 0, -2):    # The first one, of the inputs, is the smallest.
        first = f"block{second - 1}"
        model.plan = {**model.plan, f"{first}.conv": "column", f"{first}.norm": "channels", f"block{second}.conv": "row"}
    return model


class Inception(nn.Module):
    """(B, C, L) to (B, 4 filters, L): three convolutions of what a bottleneck leaves, and one of the largest of neighbours."""

    def __init__(self, inputs: int, filters: int, bottleneck: int, kernel: int):
        self.bottleneck = nn.Conv1d(inputs, bottleneck, 1, bias=False) if bottleneck and inputs > 1 else None
        narrow = inputs if self.bottleneck is None else bottleneck
        self.convs = [nn.Conv1d(narrow, filters, kernel // 2 ** i, padding="same", bias=False) for i in range(3)]
        self.pool = nn.MaxPool1d(3, stride=1, padding=1)
        self.pooled = nn.Conv1d(inputs, filters, 1, bias=False)
        self.norm = nn.BatchNorm1d(4 * filters, activation="relu")
        self.chains = [("bottleneck", f"convs.{i}") for i in range(3)]

    def forward(self, x: Any) -> Tensor:
        narrow = x if self.bottleneck is None else self.bottleneck(x)
        y = ops.concatenate([*(conv(narrow) for conv in self.convs), self.pooled(self.pool(x))], dim=1)
        out: Tensor = self.norm(y)
        return out


class Shortcut(nn.Module):
    """relu(y + norm(conv(x))) around some inception modules, y what they make of x."""

    def __init__(self, modules: Sequence[Inception], inputs: int, outputs: int):
        self.inside = list(modules)
        self.conv = nn.Conv1d(inputs, outputs, 1, bias=False)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Any) -> Tensor:
        y = x
        for module in self.inside:
            y = module(y)
        return ops.relu(y + self.norm(self.conv(x)))


@of_positions
def inception_time(inputs: int, outputs: int, depth: int = 6, filters: int = 32, bottleneck: int = 32, kernel: int = 40
                   ) -> nn.Sequential:
    """InceptionTime's network (Fawaz et al. 2020), for series of any length; the paper takes the mean of five of them.

    Every third of `depth` modules ends in a shortcut; `kernel` is the longest of three, each half as long as the one before.
    `bottleneck` 0: none.
    """
    require_sizes(inputs=inputs, outputs=outputs, depth=depth, filters=filters)
    require_sizes(0, bottleneck=bottleneck)
    require_sizes(4, kernel=kernel)
    blocks: list[tuple[str, nn.Module]] = []
    for first in range(0, depth, RESIDUAL_EVERY):
        count, before = min(RESIDUAL_EVERY, depth - first), 4 * filters if first else inputs
        modules = [Inception(4 * filters if i else before, filters, bottleneck, kernel) for i in range(count)]
        if count == RESIDUAL_EVERY:
            blocks.append((f"group{len(blocks)}", Shortcut(modules, before, 4 * filters)))
        else:
            blocks += [(f"module{i}", module) for i, module in enumerate(modules)]
    model = nn.Sequential(("input", ChannelsFirst("inception_time", inputs)), *blocks, ("mean", Mean()),
                          ("head", nn.Linear(4 * filters, outputs)))
    narrow = [path for path, module in model.named_modules() if isinstance(module, Inception) and module.bottleneck is not None]
    model.plan = {f"{path}.{layer}": style for path in narrow for layer, style in (("bottleneck", "column"), ("convs.?", "row"))}
    return model
