"""Layers that move values and change none. Letters: `N` batch, `C` channels, `r` the factor of a size."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module
from mpitrain.ops.geometry import Numbers

__all__ = ["ChannelShuffle", "Fold", "PixelShuffle", "PixelUnshuffle", "Unflatten", "Unfold"]


class Unflatten(Module):
    """Dim `dim` cut into dims of these sizes, one of which may be -1."""

    def __init__(self, dim: int, sizes: Sequence[int]):
        self.dim, self.sizes = dim, tuple(sizes)

    def forward(self, x: Any) -> Tensor:
        shape, known = tuple(x.shape), prod(n for n in self.sizes if n != -1)
        if not -len(shape) <= self.dim < len(shape):
            raise ShapeError(f"Unflatten: dim {self.dim} of an input of shape {shape}")
        dim = self.dim % len(shape)
        if self.sizes.count(-1) > 1 or (shape[dim] % max(known, 1) if -1 in self.sizes else shape[dim] != known):
            raise ShapeError(f"Unflatten: dim {dim} of an input of shape {shape} cannot be cut into {self.sizes}")
        sizes = tuple(shape[dim] // max(known, 1) if n == -1 else n for n in self.sizes)
        return ops.reshape(x, *shape[:dim], *sizes, *shape[dim + 1:])


class PixelShuffle(Module):
    """(..., C r^2, H, W) to (..., C, H r, W r): channels become pixels (Shi et al. 2016)."""

    def __init__(self, factor: int):
        self.factor = factor

    def forward(self, x: Any) -> Tensor:
        return ops.pixel_shuffle(x, self.factor)


class PixelUnshuffle(Module):
    """(..., C, H r, W r) to (..., C r^2, H, W): the inverse of `PixelShuffle`."""

    def __init__(self, factor: int):
        self.factor = factor

    def forward(self, x: Any) -> Tensor:
        return ops.pixel_unshuffle(x, self.factor)


class ChannelShuffle(Module):
    """(N, C, ...) with channels of `groups` groups in turns: the first of each, the second of each, ... (Zhang et al. 2018)."""

    def __init__(self, groups: int):
        self.groups = groups

    def forward(self, x: Any) -> Tensor:
        return ops.channel_shuffle(x, self.groups)


class Unfold(Module):
    """Patches of images (N, C, H, W) as columns (N, C kh kw, L); see `ops.im2col`."""

    def __init__(self, kernel: Numbers, dilation: Numbers = 1, padding: Numbers = 0, stride: Numbers = 1):
        self.arguments = kernel, dilation, padding, stride

    def forward(self, x: Any) -> Tensor:
        return ops.im2col(x, *self.arguments)


class Fold(Module):
    """Columns (N, C kh kw, L) added up to images (N, C, H, W) of `size`, the adjoint of `Unfold`; see `ops.fold`."""

    def __init__(self, size: Numbers, kernel: Numbers, dilation: Numbers = 1, padding: Numbers = 0, stride: Numbers = 1):
        self.arguments = size, kernel, dilation, padding, stride

    def forward(self, x: Any) -> Tensor:
        return ops.fold(x, *self.arguments)
