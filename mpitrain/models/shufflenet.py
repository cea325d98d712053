"""ShuffleNetV2 (Ma et al. 2018), with torchvision's structure and counts."""

from __future__ import annotations

import json

from mpitrain.errors import ConfigError
from mpitrain.models.mobile_blocks import PUBLISHED, ConvNorm, ShuffleUnit, check_of, norm_of, pooling, strides_of
from mpitrain.models.registry import require_sizes
from mpitrain.nn import Linear, MaxPool2d, Module, Sequential

WIDTHS = {0.5: (24, 48, 96, 192, 1024), 1.0: (24, 116, 232, 464, 1024), 1.5: (24, 176, 352, 704, 1024),
          2.0: (24, 244, 488, 976, 2048)}
"""Channels of the stem, three stages and the last convolution, by width (table 5 of the paper)."""

BLOCKS = (4, 8, 4)
PLAN = {"stage*.expand2.conv": "column", "stage*.expand2.norm": "channels", "stage*.depthwise2.conv": "channels",
        "stage*.depthwise2.norm": "channels", "stage*.project2.conv": "row",
        "last.conv": "column", "last.norm": "channels", "head": "row"}


def shufflenet_v2(classes: int = 1000, channels: int = 3, width: float = 1.0, halvings: int = PUBLISHED,
                  norm: str = "batch") -> Sequential:
    """ShuffleNetV2; `width` is 0.5, 1, 1.5 or 2.

    `halvings`: how often images are halved, 5 for about 224 x 224. With 4 the stem keeps the size; with 3 or fewer there is
    no max-pooling either.
    """
    require_sizes(classes=classes, channels=channels)
    if isinstance(width, bool) or width not in WIDTHS:
        raise ConfigError(f"model.width must be one of {', '.join(map(str, WIDTHS))}, found {json.dumps(width, default=str)}; "
                          "change model.width")
    make, (first, *stages, last) = norm_of(norm), WIDTHS[width]
    stem, pool, *strides = strides_of([2] * (2 + len(stages)), halvings)
    blocks: list[tuple[str, Module]] = [("stem", ConvNorm(channels, first, 3, stem, activation="relu", norm=make))]
    if pool == 2:
        blocks.append(("pool0", MaxPool2d(3, stride=2, padding=1)))
    inputs = first
    for s, (count, outputs, stride) in enumerate(zip(BLOCKS, stages, strides, strict=True)):
        for i in range(count):
            blocks.append((f"stage{s + 2}_block{i}", ShuffleUnit(inputs, outputs, 1 if i else stride, not i, make)))
            inputs = outputs
    model = Sequential(check_of("shufflenet_v2", channels), *blocks,
                       ("last", ConvNorm(inputs, last, 1, activation="relu", norm=make)), *pooling(),
                       ("head", Linear(last, classes)))
    model.plan = PLAN
    return model
