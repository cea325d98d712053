"""Vision transformers: images as sequences of patches (Dosovitskiy et al. 2021; the small sizes are Touvron et al.'s, 2021).

Letters: `N` batch, `C` channels, `H` and `W` sides of an image, `L` length (the patches and the class token), `D` width.
"""

from __future__ import annotations

from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.models.registry import require_sizes
from mpitrain.nn import init
from mpitrain.nn.basic import Check

__all__ = ["vit", "vit_b_16", "vit_s_16", "vit_ti_16"]

WEIGHTS = init.normal(0.02)
EPS = 1e-6                                        # of the norms, as the paper's code and torchvision have it
PLAN = {"block*.attention.qkv": "column", "block*.attention.out": "row", "block*.wide": "column", "block*.narrow": "row"}


class Patches(nn.Module):
    """Images (N, C, H, W) to (N, L, D): a trained token, then each patch by a linear map; plus a row for each position."""

    def __init__(self, channels: int, size: int, patch: int, width: int, dropout: float):
        self.conv = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter((1, 1, width), init.zeros)
        self.position = nn.Parameter((1, 1 + (size // patch) ** 2, width), WEIGHTS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Tensor:
        patches = self.conv(x)
        n, width = patches.shape[:2]
        rows = ops.swapaxes(ops.reshape(patches, n, width, -1), 1, 2)
        joined = ops.concatenate([ops.broadcast_to(self.token, (n, 1, width)), rows], 1)
        out: Tensor = self.dropout(joined + self.position)
        return out


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); (N, L, D) to (N, L, D). Every position sees all others."""

    chains = ("wide", "narrow"),

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attention = nn.MultiHeadAttention(width, heads, qkv_init=WEIGHTS, out_init=WEIGHTS)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.wide = nn.Linear(width, hidden, activation="gelu", weight_init=WEIGHTS, bias_init=init.zeros)
        self.narrow = nn.Linear(hidden, width, weight_init=WEIGHTS, bias_init=init.zeros)
        self.dropout2 = nn.DropoutAdd(dropout)

    def forward(self, x: Any) -> Tensor:
        x, normed = self.norm2(self.attention(self.norm1(x)), x, self.dropout1)
        out: Tensor = self.dropout2(self.narrow(self.wide(normed)), x)
        return out


class ClassToken(nn.Module):
    """(N, L, D) to (N, D): the first position, which has looked at all others."""

    def forward(self, x: Any) -> Tensor:
        out: Tensor = x[:, 0]
        return out


def vit(classes: int = 1000, channels: int = 3, size: int = 224, patch: int = 16, width: int = 768, layers: int = 12,
        heads: int = 12, hidden: int | None = None, dropout: float = 0.0) -> nn.Sequential:
    """A vision transformer for images of `size` x `size`, whose patches are `patch` x `patch`.

    `hidden`, the width inside of an MLP, is 4 times `width` by default. `dropout` acts on the embedded patches and before both
    sums of a block.
    """
    hidden = 4 * width if hidden is None else hidden
    require_sizes(classes=classes, channels=channels, size=size, patch=patch, width=width, layers=layers, heads=heads,
                  hidden=hidden)
    if size % patch:
        raise ShapeError(f"vit cannot cut images of {size}x{size} into patches of {patch}x{patch}; model.size must be a multiple "
                         "of model.patch")
    model = nn.Sequential(
        ("input", Check("vit", (None, channels, size, size), "set model.channels and model.size")),
        ("embed", Patches(channels, size, patch, width, dropout)),
        *((f"block{i}", EncoderBlock(width, heads, hidden, dropout)) for i in range(layers)),
        ("norm", nn.LayerNorm(width, EPS)), ("first", ClassToken()),
        ("head", nn.Linear(width, classes, weight_init=init.zeros, bias_init=init.zeros)))
    model.plan = PLAN
    return model


def vit_ti_16(classes: int = 1000, channels: int = 3, size: int = 224, dropout: float = 0.0) -> nn.Sequential:
    """DeiT's tiny size: 5.7 million parameters; see `vit`."""
    return vit(classes, channels, size, 16, 192, 12, 3, dropout=dropout)


def vit_s_16(classes: int = 1000, channels: int = 3, size: int = 224, dropout: float = 0.0) -> nn.Sequential:
    """DeiT's small size: 22 million parameters; see `vit`."""
    return vit(classes, channels, size, 16, 384, 12, 6, dropout=dropout)


def vit_b_16(classes: int = 1000, channels: int = 3, size: int = 224, dropout: float = 0.0) -> nn.Sequential:
    """The base size, torchvision's of that name: 86.6 million parameters; see `vit`."""
    return vit(classes, channels, size, 16, 768, 12, 12, dropout=dropout)
