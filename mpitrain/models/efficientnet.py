"""EfficientNet (Tan and Le 2019), with torchvision's structure and counts."""

from __future__ import annotations

import math

from mpitrain.models.mobile_blocks import (
    LAST,
    PUBLISHED,
    ConvNorm,
    InvertedResidual,
    check_of,
    norm_of,
    plan_of,
    pooling,
    repeated,
    rounded,
    strides_of,
)
from mpitrain.models.registry import require_positive, require_sizes
from mpitrain.nn import Dropout, Linear, Module, Sequential, init
from mpitrain.nn.basic import probability

STAGES = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
          (6, 3, 1, 320, 1))
"""Of each stage: the expansion, kernel, stride of the first block, channels and blocks (table 1 of the paper)."""


def efficientnet_b0(classes: int = 1000, channels: int = 3, width: float = 1.0, depth: float = 1.0, dropout: float = 0.2,
                    drop_path: float = 0.2, halvings: int = PUBLISHED, norm: str = "batch") -> Sequential:
    """EfficientNet-B0; `width` multiplies channels and `depth` blocks, rounded up: 1.0 and 1.1 make B1, 1.1 and 1.2 B2.

    Block i of n is left out for a sample with probability `drop_path` i / n (stochastic depth, Huang et al. 2016). `halvings`:
    how often images are halved, 5 for about 224 x 224; 3 or 4 suit 28 x 28.
    """
    require_sizes(classes=classes, channels=channels)
    require_positive(width=width, depth=depth)
    make, most = norm_of(norm), probability(drop_path)
    strides = strides_of([2, *(stride for _, _, stride, _, _ in STAGES)], halvings)
    counts = [repeated(count, depth) for *_, count in STAGES]
    inputs = rounded(32 * width)
    blocks: list[tuple[str, Module]] = [("stem", ConvNorm(channels, inputs, 3, strides[0], activation="silu", norm=make))]
    for stride, count, (factor, kernel, _, outputs, _) in zip(strides[1:], counts, STAGES, strict=True):
        wide = rounded(outputs * width)
        for i in range(count):
            place = len(blocks) - 1
            blocks.append((f"block{place}", InvertedResidual(
                inputs, rounded(factor * inputs), wide, kernel, 1 if i else stride, "silu", make,
                squeezed=max(1, inputs // 4), squeeze_activation="silu", drop_path=most * place / sum(counts))))
            inputs = wide
    last = 4 * inputs
    head = Linear(last, classes, weight_init=init.uniform(1 / math.sqrt(classes)), bias_init=init.zeros)
    model = Sequential(
        check_of("efficientnet_b0", channels), *blocks, ("last", ConvNorm(inputs, last, 1, activation="silu", norm=make)),
        *pooling(), ("dropout", Dropout(dropout)), ("head", head))
    model.plan = {**plan_of(blocks), **LAST}
    return model
