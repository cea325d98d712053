"""Swin transformers: attention in windows of an image, which are shifted in every second block (Liu et al. 2021).

Letters: `N` batch, `H` and `W` sides of an image in patches, `D` width, `S` side of a window, `T` = S * S positions in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import init
from mpitrain.nn.basic import Check, probability

__all__ = ["swin", "swin_t"]

WEIGHTS = init.normal(0.02)
FAR = -100.0                                      # is added to scores between regions that are no neighbours in the image
PLAN = {"*_block*.attention.qkv": "column", "*_block*.attention.out": "row", "*_block*.bias": "column",
        "*_block*.wide": "column", "*_block*.narrow": "row"}


class Patches(nn.Module):
    """Images (N, C, H', W') to (N, H, W, D): a norm of a linear map of each patch."""

    def __init__(self, channels: int, patch: int, width: int):
        self.conv = nn.Conv2d(channels, width, patch, stride=patch)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.norm(ops.transpose(self.conv(x), 0, 2, 3, 1))
        return out


class Merge(nn.Module):
    """(N, H, W, D) to (N, H/2, W/2, 2 D): a linear map of four neighbours side by side. An odd side gets zeros at its end."""

    def __init__(self, width: int):
        self.norm = nn.LayerNorm(4 * width)
        self.narrow = nn.Linear(4 * width, 2 * width, bias=False, weight_init=WEIGHTS)

    def forward(self, x: Any) -> Tensor:
        x = _padded(x, 2)
        four = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        out: Tensor = self.narrow(self.norm(ops.concatenate(four, -1)))
        return out


class WindowBlock(nn.Module):
    """x + attention(norm(x)) within windows, then x + mlp(norm(x)); (N, H, W, D) to (N, H, W, D).

    With `shifted`, windows begin half a window further, and go around the edges of the image; positions that meet there do not
    see each other. The scores of each head have a trained number for each distance of two positions. It is the weight of a
    linear layer, so that ranks may have some heads each.
    """

    chains = ("wide", "narrow"), ("bias", "attention.out")

    def __init__(self, width: int, heads: int, window: int, shifted: bool, drop_path: float):
        self.window, self.shift = window, window // 2 if shifted else 0
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiHeadAttention(width, heads, qkv_init=WEIGHTS, out_init=WEIGHTS)
        self.bias = nn.Linear((2 * window - 1) ** 2, heads, bias=False, weight_init=WEIGHTS)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width, activation="gelu", weight_init=WEIGHTS, bias_init=init.zeros)
        self.narrow = nn.Linear(4 * width, width, weight_init=WEIGHTS, bias_init=init.zeros)
        self.drop_path = nn.DropPath(drop_path)

    def forward(self, x: Any) -> Tensor:
        x = x + self.drop_path(self._attend(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.narrow(self.wide(self.norm2(x))))
        return out

    def _attend(self, x: Any) -> Tensor:
        height, width = x.shape[1:3]
        side = self.window
        x = _padded(x, side)
        n, tall, wide, channels = x.shape
        shifts = (0 if tall <= side else self.shift, 0 if wide <= side else self.shift)
        if any(shifts):
            x = ops.roll(x, (-shifts[0], -shifts[1]), (1, 2))
        rows, columns = tall // side, wide // side
        windows = ops.transpose(ops.reshape(x, n, rows, side, columns, side, channels), 0, 1, 3, 2, 4, 5)
        y = self.attention(ops.reshape(windows, n * rows * columns, side * side, channels), self._scores(n, tall, wide, shifts))
        y = ops.transpose(ops.reshape(y, n, rows, columns, side, side, channels), 0, 1, 3, 2, 4, 5)
        whole = ops.reshape(y, n, tall, wide, channels)
        if any(shifts):
            whole = ops.roll(whole, shifts, (1, 2))
        return whole if (tall, wide) == (height, width) else whole[:, :height, :width]

    def _scores(self, n: int, tall: int, wide: int, shifts: tuple[int, int]) -> Tensor:
        """What is added to the scores: (1, heads, T, T), or, where windows are shifted, (windows, heads, T, T)."""
        xp, dtype, t = self.bias.weight.xp, self.bias.weight.dtype, self.window ** 2
        table = self.bias(xp.eye((2 * self.window - 1) ** 2, dtype=dtype))
        near = ops.transpose(ops.reshape(table[xp.asarray(distances(self.window))], t, t, -1), 2, 0, 1)[None]
        if not any(shifts):
            return near
        apart = xp.asarray(regions_apart(tall, wide, self.window, shifts), dtype=dtype)[:, None]
        every = near + apart
        return ops.reshape(ops.broadcast_to(every[None], (n, *every.shape)), n * len(apart), *every.shape[1:])


class Mean(nn.Module):
    """(N, H, W, D) to (N, D)."""

    def forward(self, x: Any) -> Tensor:
        out: Tensor = ops.mean(x, dim=(1, 2))
        return out


def _padded(x: Any, side: int) -> Any:
    """x (N, H, W, D) with zeros at the ends of H and W, up to multiples of `side`."""
    below, right = (-x.shape[1] % side, -x.shape[2] % side)
    return ops.pad(x, [(0, 0), (0, below), (0, right), (0, 0)]) if below or right else x


@lru_cache(16)
def distances(side: int) -> Array:
    """(T * T,): for each pair of positions in a window, the number of the distance between them."""
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).reshape(2, -1)
    down, right = places[:, :, None] - places[:, None, :] + side - 1
    found: Array = (down * (2 * side - 1) + right).reshape(-1)
    return found


@lru_cache(16)
def regions_apart(tall: int, wide: int, side: int, shifts: tuple[int, int]) -> Array:
    """(windows, T, T): 0 for positions that are neighbours in the image, `FAR` for those that only the shift brings together."""
    down, right = (np.arange(size) >= size - shift for size, shift in zip((tall, wide), shifts))     # came round the edge
    regions = 2 * down[:, None] + right[None, :]
    windows = regions.reshape(tall // side, side, wide // side, side).swapaxes(1, 2).reshape(-1, side * side)
    return np.where(windows[:, :, None] == windows[:, None, :], 0.0, FAR)


def swin(classes: int = 1000, channels: int = 3, patch: int = 4, width: int = 96, depths: Sequence[int] = (2, 2, 6, 2),
         heads: Sequence[int] = (3, 6, 12, 24), window: int = 7, drop_path: float = 0.2) -> nn.Sequential:
    """A Swin transformer for images of any size: stages of `depths` blocks with `heads` heads each, from one to the next with
    half as many positions on a side and twice the width.

    `drop_path` is the probability that a block's branch is left out for a sample: so much in the last block, less before it.
    """
    require_sizes(classes=classes, channels=channels, patch=patch, width=width, window=window)
    require_list_of_sizes("depths", depths)
    require_list_of_sizes("heads", heads, len(depths))
    if not depths:
        raise ConfigError("model.depths must have a number of blocks for each stage, found none; change model.depths")
    most = probability(drop_path)
    total, blocks, features = sum(depths), list[tuple[str, nn.Module]](), width
    for s, (depth, count) in enumerate(zip(depths, heads)):
        if s:
            blocks.append((f"merge{s}", Merge(features)))
            features *= 2
        for b in range(depth):
            done = sum(depths[:s]) + b
            blocks.append((f"stage{s + 1}_block{b}",
                           WindowBlock(features, count, window, b % 2 == 1, most * done / max(total - 1, 1))))
    model = nn.Sequential(
        ("input", Check("swin", (None, channels, None, None), "set model.channels")),
        ("embed", Patches(channels, patch, width)), *blocks, ("norm", nn.LayerNorm(features)), ("mean", Mean()),
        ("head", nn.Linear(features, classes, weight_init=WEIGHTS, bias_init=init.zeros)))
    model.plan = PLAN
    return model


def swin_t(classes: int = 1000, channels: int = 3, drop_path: float = 0.2) -> nn.Sequential:
    """The tiny size, torchvision's of that name: 28.3 million parameters; see `swin`."""
    return swin(classes, channels, drop_path=drop_path)
