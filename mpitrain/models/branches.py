"""Nets whose blocks put the results of several branches side by side: DenseNet, SqueezeNet and GoogLeNet.

Their input is (B, C, H, W); they halve it five times (SqueezeNet: four times).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
    init,
)
from mpitrain.nn.basic import Check
from mpitrain.nn.norm import NORMS

HE = init.kaiming_normal()
GLOROT = init.xavier_uniform()
DENSENET_PLAN = {"block*.conv1": "column", "block*.norm2": "channels", "block*.conv2": "row"}
SQUEEZENET_PLAN = {"fire*.squeeze": "column", "fire*.expand?": "row"}
GOOGLENET_PLAN = {"conv2.conv": "column", "conv2.norm": "channels", "conv3.conv": "row", "inception*.branch[23].0.conv": "column",
                  "inception*.branch[23].0.norm": "channels", "inception*.branch[23].1.conv": "row"}
INCEPTION_EPS = 1e-3


class DenseLayer(Module):
    """x and `growth` new channels: 1 x 1 to `inner` channels, 3 x 3, each after a norm and ReLU (Huang et al. 2017)."""

    chains = ("conv1", "norm2", "conv2"),

    def __init__(self, inputs: int, growth: int, inner: int, norm: str):
        make = NORMS.resolve(norm)
        self.norm1 = make(inputs, activation="relu")
        self.conv1 = Conv2d(inputs, inner, 1, bias=False, weight_init=HE)
        self.norm2 = make(inner, activation="relu")
        self.conv2 = Conv2d(inner, growth, 3, padding=1, bias=False, weight_init=HE)

    def forward(self, x: Any) -> Tensor:
        return ops.concatenate([x, self.conv2(self.norm2(self.conv1(self.norm1(x))))], 1)


def densenet121(classes: int = 1000, channels: int = 3, norm: str = "batch", growth: int = 32,
                layers: Sequence[int] = (6, 12, 24, 16)) -> Sequential:
    """DenseNet-121 (Huang et al. 2017), for images of about 224 x 224; torchvision's of that name.

    Each layer of a block adds `growth` channels, `layers` are their numbers in each of the four blocks, and between two blocks
    half of the channels go. The stem has twice `growth`, a layer four times as many inside.
    """
    require_sizes(classes=classes, channels=channels, growth=growth)
    require_list_of_sizes("layers", layers, 4)
    make, width = NORMS.resolve(norm), 2 * growth
    blocks: list[tuple[str, Module]] = [
        ("input", Check("densenet121", (None, channels, None, None), "set model.channels")),
        ("conv", Conv2d(channels, width, 7, stride=2, padding=3, bias=False, weight_init=HE)),
        ("norm", make(width, activation="relu")), ("pool0", MaxPool2d(3, stride=2, padding=1))]
    for b, count in enumerate(layers):
        for i in range(count):
            blocks.append((f"block{b + 1}_layer{i + 1}", DenseLayer(width, growth, 4 * growth, norm)))
            width += growth
        if b < 3:
            conv = Conv2d(width, width // 2, 1, bias=False, weight_init=HE)
            blocks.append((f"transition{b + 1}", Sequential(
                ("norm", make(width, activation="relu")), ("conv", conv), ("pool", AvgPool2d(2)))))
            width //= 2
    model = Sequential(*blocks, ("last_norm", make(width, activation="relu")), ("pool", AdaptiveAvgPool2d(1)),
                       ("flatten", Flatten()), ("head", Linear(width, classes, bias_init=init.zeros)))
    model.plan = DENSENET_PLAN
    return model


class Fire(Module):
    """1 x 1 to `squeezed` channels, of which 1 x 1 and 3 x 3 make `outputs` / 2 each, side by side (Iandola et al. 2016)."""

    chains = ("squeeze", "expand1"), ("squeeze", "expand3")

    def __init__(self, inputs: int, squeezed: int, outputs: int):
        values = {"weight_init": init.kaiming_uniform(), "bias_init": init.zeros}
        self.squeeze = Conv2d(inputs, squeezed, 1, **values)
        self.expand1 = Conv2d(squeezed, outputs // 2, 1, **values)
        self.expand3 = Conv2d(squeezed, outputs // 2, 3, padding=1, **values)

    def forward(self, x: Any) -> Tensor:
        x = ops.relu(self.squeeze(x))
        return ops.relu(ops.concatenate([self.expand1(x), self.expand3(x)], 1))


def squeezenet(classes: int = 1000, channels: int = 3, version: str = "1.1", dropout: float = 0.5, width: int = 16) -> Sequential:
    """SqueezeNet 1.0 (Iandola et al. 2016) or 1.1 (its README: 2.4 times less work), torchvision's squeezenet1_0 and 1_1.

    Images are of about 224 x 224. `width` are the squeezed channels of the first of eight fire modules.
    """
    require_sizes(classes=classes, channels=channels, width=width)
    if version not in ("1.0", "1.1"):
        raise ConfigError(f'model.version must be "1.0" or "1.1", found {json.dumps(version)}; change model.version')
    old = version == "1.0"
    outputs, kernel, padding = (6 * width, 7, 0) if old else (4 * width, 3, 0)
    conv = Conv2d(channels, outputs, kernel, stride=2, padding=padding, weight_init=init.kaiming_uniform(), bias_init=init.zeros)
    blocks: list[tuple[str, Module]] = [
        ("input", Check("squeezenet", (None, channels, None, None), "set model.channels")), ("conv", conv),
        ("pool1", MaxPool2d(3, 2, ceil_mode=True, activation="relu"))]
    pools = (3, 7) if old else (2, 4)                     # Behind these fire modules, counted from 1.
    for i, squeezed in enumerate((1, 1, 2, 2, 3, 3, 4, 4), 1):
        blocks.append((f"fire{i + 1}", Fire(outputs, squeezed * width, 8 * squeezed * width)))
        outputs = 8 * squeezed * width
        if i in pools:
            blocks.append((f"pool{i + 1}", MaxPool2d(3, 2, ceil_mode=True)))
    head = Conv2d(outputs, classes, 1, weight_init=init.normal(0.01), bias_init=init.zeros)
    model = Sequential(*blocks, ("dropout", Dropout(dropout)), ("head", head), ("relu", ReLU()), ("pool", AdaptiveAvgPool2d(1)),
                       ("flatten", Flatten()))
    model.plan = SQUEEZENET_PLAN
    return model


class _ConvNorm(Module):
    """A convolution without bias, a norm, ReLU."""

    paths = ("conv", "norm"),

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: str, stride: int = 1):
        self.conv = Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False, weight_init=GLOROT)
        self.norm = NORMS.resolve(norm)(outputs, eps=INCEPTION_EPS, activation="relu")

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


class Inception(Module):
    """1 x 1; 1 x 1 then 3 x 3; the same again; a pool then 1 x 1: side by side (Szegedy et al. 2015).

    `widths`: the outputs of these six convolutions, in order. The third branch's window is 3 x 3, as torchvision has it, where
    the paper's is 5 x 5.
    """

    def __init__(self, inputs: int, widths: Sequence[int], norm: str):
        one, two_before, two, three_before, three, pooled = widths
        self.branch1 = _ConvNorm(inputs, one, 1, norm)
        self.branch2 = Sequential(_ConvNorm(inputs, two_before, 1, norm), _ConvNorm(two_before, two, 3, norm))
        self.branch3 = Sequential(_ConvNorm(inputs, three_before, 1, norm), _ConvNorm(three_before, three, 3, norm))
        self.branch4 = Sequential(MaxPool2d(3, 1, 1, ceil_mode=True), _ConvNorm(inputs, pooled, 1, norm))

    def forward(self, x: Any) -> Tensor:
        return ops.concatenate([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


GOOGLENET = {"3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64), "4a": (192, 96, 208, 16, 48, 64),
             "4b": (160, 112, 224, 24, 64, 64), "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
             "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128), "5b": (384, 192, 384, 48, 128, 128)}


def googlenet(classes: int = 1000, channels: int = 3, norm: str = "batch", dropout: float = 0.2, width: int = 64) -> Sequential:
    """GoogLeNet (Szegedy et al. 2015) with batch norm and without auxiliary heads, for images of about 224 x 224.

    torchvision's of that name with aux_logits=False. `width` are the channels of the stem; all others are so many 64ths of what
    the paper has for 64.
    """
    require_sizes(classes=classes, channels=channels, width=width)

    def of(channels: int) -> int:
        return max(1, channels * width // 64)
    inputs = of(192)
    blocks: list[tuple[str, Module]] = [
        ("input", Check("googlenet", (None, channels, None, None), "set model.channels")),
        ("conv1", _ConvNorm(channels, width, 7, norm, 2)), ("pool1", MaxPool2d(3, 2, ceil_mode=True)),
        ("conv2", _ConvNorm(width, width, 1, norm)), ("conv3", _ConvNorm(width, inputs, 3, norm)),
        ("pool2", MaxPool2d(3, 2, ceil_mode=True))]
    for name, widths in GOOGLENET.items():
        if name == "4a":
            blocks.append(("pool3", MaxPool2d(3, 2, ceil_mode=True)))
        elif name == "5a":
            blocks.append(("pool4", MaxPool2d(2, ceil_mode=True)))
        scaled = [of(n) for n in widths]
        blocks.append((f"inception{name}", Inception(inputs, scaled, norm)))
        inputs = scaled[0] + scaled[2] + scaled[4] + scaled[5]
    model = Sequential(*blocks, ("pool", AdaptiveAvgPool2d(1)), ("flatten", Flatten()), ("dropout", Dropout(dropout)),
                       ("head", Linear(inputs, classes)))
    model.plan = GOOGLENET_PLAN
    return model
