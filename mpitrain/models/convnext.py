"""ConvNeXt (Liu et al. 2022), with torchvision's structure and counts. Letters: `N` batch, `C` channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.mobile_blocks import PUBLISHED, check_of, pooling
from mpitrain.models.registry import require_list_of_sizes, require_positive, require_sizes
from mpitrain.nn import Conv2d, DropPath, Linear, Module, Parameter, Sequential, init
from mpitrain.nn.basic import probability
from mpitrain.nn.norm import LayerNorm

WIDTHS, BLOCKS = (96, 192, 384, 768), (3, 3, 9, 3)
NORMAL = init.truncated_normal(0.02)
EPS = 1e-6


class ChannelLayerNorm(LayerNorm):
    """Layer norm of the C numbers at each position of images (N, C, H, W)."""

    by_position = False

    def __init__(self, channels: int):
        super().__init__(channels, eps=EPS)

    def forward(self, x: Any, residual: Any = None, dropping: Any = None) -> Tensor:
        y: Tensor = ops.permute(super().forward(ops.permute(x, (0, 2, 3, 1))), (0, 3, 1, 2))
        return y


class ConvNeXtBlock(Module):
    """x + scale * narrow(gelu(wide(norm(depthwise(x))))), with a depthwise kernel of 7 x 7 and linear layers at each position.

    `scale`, one number a channel, starts small (Touvron et al. 2021). The branch is left out for a sample with probability
    `drop_path`.
    """

    chains = ("wide", "narrow"),

    def __init__(self, channels: int, scale: float, drop_path: float):
        self.scale = Parameter((channels, 1, 1), init.constant(scale))
        self.depthwise = Conv2d(channels, channels, 7, padding=3, groups=channels, weight_init=NORMAL, bias_init=init.zeros)
        self.norm = LayerNorm(channels, eps=EPS)
        self.wide = _linear(channels, 4 * channels, "gelu")
        self.narrow = _linear(4 * channels, channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Any) -> Tensor:
        y = ops.permute(self.depthwise(x), (0, 2, 3, 1))
        y = ops.permute(self.narrow(self.wide(self.norm(y))), (0, 3, 1, 2))
        return ops.add(x, self.drop_path(ops.multiply(self.scale, y)))


def convnext_tiny(classes: int = 1000, channels: int = 3, widths: Sequence[int] = WIDTHS, blocks: Sequence[int] = BLOCKS,
                  scale: float = 1e-6, drop_path: float = 0.1, halvings: int = PUBLISHED) -> Sequential:
    """ConvNeXt-T: four stages of `widths` channels and `blocks` blocks, over patches of 4 x 4 pixels.

    `scale`: what the scales of branches start from. Block i of n is left out for a sample with probability `drop_path` i /
    (n - 1). `halvings`: how often images are halved, 5 for about 224 x 224; patches are 2 x 2 with 4, and pixels with 3.
    """
    require_sizes(classes=classes, channels=channels, halvings=halvings)
    require_list_of_sizes("widths", widths, len(WIDTHS))
    require_list_of_sizes("blocks", blocks, len(BLOCKS))
    require_positive(scale=scale)
    if not len(WIDTHS) - 1 <= halvings <= PUBLISHED:
        raise ConfigError(f"model.halvings must be {len(WIDTHS) - 1} to {PUBLISHED}, found {halvings}; change model.halvings")
    patch = 2 ** (halvings - len(WIDTHS) + 1)
    named: list[tuple[str, Module]] = [("stem", _patches(channels, widths[0], patch)), ("norm0", ChannelLayerNorm(widths[0]))]
    most, place, total = probability(drop_path), 0, max(sum(blocks) - 1, 1)
    for s, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        if s:
            named += [(f"norm{s}", ChannelLayerNorm(widths[s - 1])), (f"down{s}", _patches(widths[s - 1], width, 2))]
        for i in range(count):
            named.append((f"stage{s + 1}_block{i}", ConvNeXtBlock(width, scale, most * place / total)))
            place += 1
    model = Sequential(check_of("convnext_tiny", channels), *named, *pooling(),
                       ("norm", LayerNorm(widths[-1], eps=EPS)), ("head", _linear(widths[-1], classes)))
    model.plan = {"stage*.wide": "column", "stage*.narrow": "row"}
    return model


def _patches(inputs: int, outputs: int, size: int) -> Conv2d:
    return Conv2d(inputs, outputs, size, stride=size, weight_init=NORMAL, bias_init=init.zeros)


def _linear(inputs: int, outputs: int, activation: str | None = None) -> Linear:
    return Linear(inputs, outputs, activation=activation, weight_init=NORMAL, bias_init=init.zeros)
