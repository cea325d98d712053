"""MobileNets of the second and the third version, and MnasNet: inverted residuals, with torchvision's structure and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain.models.mobile_blocks import (
    LAST,
    PUBLISHED,
    SMALL_NORMAL,
    ConvNorm,
    InvertedResidual,
    check_of,
    norm_of,
    plan_of,
    pooling,
    rounded,
    strides_of,
)
from mpitrain.models.registry import require_positive, require_sizes
from mpitrain.nn import Dropout, Linear, Module, Sequential, init

V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Of each stage: the expansion, channels, blocks, and the stride of the first block (table 2 of the paper)."""

MNAS = ((3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5), (6, 96, 2, 1, 3), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
"""The same, and the kernel (figure 7 of the paper, without squeeze-and-excitation)."""


class Row(NamedTuple):
    """A block of MobileNetV3: kernel, inner channels, outputs, whether gated, activation, stride (tables 1 and 2)."""

    kernel: int
    inner: int
    outputs: int
    gated: bool
    activation: str
    stride: int


V3_SMALL = (
    Row(3, 16, 16, True, "relu", 2), Row(3, 72, 24, False, "relu", 2), Row(3, 88, 24, False, "relu", 1),
    Row(5, 96, 40, True, "hardswish", 2), Row(5, 240, 40, True, "hardswish", 1), Row(5, 240, 40, True, "hardswish", 1),
    Row(5, 120, 48, True, "hardswish", 1), Row(5, 144, 48, True, "hardswish", 1), Row(5, 288, 96, True, "hardswish", 2),
    Row(5, 576, 96, True, "hardswish", 1), Row(5, 576, 96, True, "hardswish", 1))
V3_LARGE = (
    Row(3, 16, 16, False, "relu", 1), Row(3, 64, 24, False, "relu", 2), Row(3, 72, 24, False, "relu", 1),
    Row(5, 72, 40, True, "relu", 2), Row(5, 120, 40, True, "relu", 1), Row(5, 120, 40, True, "relu", 1),
    Row(3, 240, 80, False, "hardswish", 2), Row(3, 200, 80, False, "hardswish", 1), Row(3, 184, 80, False, "hardswish", 1),
    Row(3, 184, 80, False, "hardswish", 1), Row(3, 480, 112, True, "hardswish", 1), Row(3, 672, 112, True, "hardswish", 1),
    Row(5, 672, 160, True, "hardswish", 2), Row(5, 960, 160, True, "hardswish", 1), Row(5, 960, 160, True, "hardswish", 1))


def mobilenet_v2(classes: int = 1000, channels: int = 3, width: float = 1.0, dropout: float = 0.2, halvings: int = PUBLISHED,
                 norm: str = "batch") -> Sequential:
    """MobileNetV2 (Sandler et al. 2018); `width` multiplies all channels but the last, which it does not make fewer.

    `halvings`: how often images are halved, 5 for about 224 x 224; 3 or 4 suit 28 x 28.
    """
    require_sizes(classes=classes, channels=channels)
    require_positive(width=width)
    make = norm_of(norm)
    strides = strides_of([2, *(stride for *_, stride in V2)], halvings)
    inputs, last = rounded(32 * width), rounded(1280 * max(1.0, width))
    blocks: list[tuple[str, Module]] = [("stem", ConvNorm(channels, inputs, 3, strides[0], activation="relu6", norm=make))]
    for stride, (factor, outputs, count, _) in zip(strides[1:], V2, strict=True):
        for i in range(count):
            wide = rounded(outputs * width)
            blocks.append((f"block{len(blocks) - 1}", InvertedResidual(
                inputs, factor * inputs, wide, 3, 1 if i else stride, "relu6", make)))
            inputs = wide
    model = Sequential(
        check_of("mobilenet_v2", channels), *blocks, ("last", ConvNorm(inputs, last, 1, activation="relu6", norm=make)),
        *pooling(), ("dropout", Dropout(dropout)), ("head", _classifier(last, classes)))
    model.plan = {**plan_of(blocks), **LAST}
    return model


def mobilenet_v3_small(classes: int = 1000, channels: int = 3, width: float = 1.0, dropout: float = 0.2,
                       halvings: int = PUBLISHED, norm: str = "batch") -> Sequential:
    """MobileNetV3-Small (Howard et al. 2019); see `mobilenet_v2`. `width` multiplies all channels.

    The momentum of its norms is PyTorch's 0.1, where torchvision has 0.01: after 150 steps a fifth of those statistics would
    still be what they started from, and eval would give chance.
    """
    return _version_3("mobilenet_v3_small", V3_SMALL, 1024, classes, channels, width, dropout, halvings, norm)


def mobilenet_v3_large(classes: int = 1000, channels: int = 3, width: float = 1.0, dropout: float = 0.2,
                       halvings: int = PUBLISHED, norm: str = "batch") -> Sequential:
    """MobileNetV3-Large; see `mobilenet_v3_small`."""
    return _version_3("mobilenet_v3_large", V3_LARGE, 1280, classes, channels, width, dropout, halvings, norm)


def _version_3(name: str, rows: Sequence[Row], hidden: int, classes: int, channels: int, width: float, dropout: float,
               halvings: int, norm: str) -> Sequential:
    require_sizes(classes=classes, channels=channels)
    require_positive(width=width)
    make = norm_of(norm, eps=1e-3)
    strides = strides_of([2, *(row.stride for row in rows)], halvings)
    inputs = rounded(16 * width)
    blocks: list[tuple[str, Module]] = [("stem", ConvNorm(channels, inputs, 3, strides[0], activation="hardswish", norm=make))]
    for i, (stride, row) in enumerate(zip(strides[1:], rows, strict=True)):
        inner, outputs = rounded(row.inner * width), rounded(row.outputs * width)
        blocks.append((f"block{i}", InvertedResidual(
            inputs, inner, outputs, row.kernel, stride, row.activation, make,
            squeezed=rounded(inner // 4) if row.gated else None, gate="hardsigmoid")))
        inputs = outputs
    last, hidden = 6 * inputs, rounded(hidden * width)
    model = Sequential(
        check_of(name, channels), *blocks, ("last", ConvNorm(inputs, last, 1, activation="hardswish", norm=make)),
        *pooling(), ("hidden", _classifier(last, hidden, "hardswish")), ("dropout", Dropout(dropout)),
        ("head", _classifier(hidden, classes)))
    model.plan = {**plan_of(blocks), "hidden": "column", "dropout": "channels", "head": "row"}
    return model


def mnasnet(classes: int = 1000, channels: int = 3, width: float = 1.0, dropout: float = 0.2, halvings: int = PUBLISHED,
            norm: str = "batch") -> Sequential:
    """MnasNet-B1 (Tan et al. 2019); `width` multiplies all channels but the last. See `mobilenet_v2`.

    The momentum of its norms is PyTorch's 0.1, where torchvision has 0.0003, which suits runs of some 100,000 steps.
    """
    require_sizes(classes=classes, channels=channels)
    require_positive(width=width)
    make: Any = norm_of(norm)
    strides = strides_of([2, *(stride for _, _, _, stride, _ in MNAS)], halvings)
    inputs, outputs = rounded(32 * width), rounded(16 * width)
    blocks: list[tuple[str, Module]] = [
        ("stem", ConvNorm(channels, inputs, 3, strides[0], activation="relu", norm=make)),
        ("depthwise", ConvNorm(inputs, inputs, 3, 1, inputs, "relu", make)), ("project", ConvNorm(inputs, outputs, 1, norm=make))]
    inputs, before = outputs, len(blocks)
    for stride, (factor, outputs, count, _, kernel) in zip(strides[1:], MNAS, strict=True):
        for i in range(count):
            wide = rounded(outputs * width)
            blocks.append((f"block{len(blocks) - before}", InvertedResidual(
                inputs, factor * inputs, wide, kernel, 1 if i else stride, "relu", make, always=True)))
            inputs = wide
    model = Sequential(
        check_of("mnasnet", channels), *blocks, ("last", ConvNorm(inputs, 1280, 1, activation="relu", norm=make)),
        *pooling(), ("dropout", Dropout(dropout)), ("head", _classifier(1280, classes)))
    model.plan = {**plan_of(blocks), **LAST}
    return model


def _classifier(inputs: int, outputs: int, activation: str | None = None) -> Linear:
    return Linear(inputs, outputs, activation=activation, weight_init=SMALL_NORMAL, bias_init=init.zeros)
