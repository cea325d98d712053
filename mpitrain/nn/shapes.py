"""Layers that move values and change none. Letters: `N` batch, `C` channels, `r` the factor of a size."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module

__all__ = ["ChannelShuffle", "PixelShuffle", "PixelUnshuffle", "Unflatten"]


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
        self.factor = _at_least_one("PixelShuffle", "factor", factor)

    def forward(self, x: Any) -> Tensor:
        shape, r = tuple(x.shape), self.factor
        if len(shape) < 3 or shape[-3] % (r * r):
            raise ShapeError(f"PixelShuffle expects (..., C, H, W) with a multiple of {r * r} channels, got shape {shape}")
        *lead, c, h, w = shape
        n = len(lead)
        x = ops.reshape(x, *lead, c // (r * r), r, r, h, w)
        x = ops.transpose(x, *range(n), n, n + 3, n + 1, n + 4, n + 2)
        return ops.reshape(x, *lead, c // (r * r), h * r, w * r)


class PixelUnshuffle(Module):
    """(..., C, H r, W r) to (..., C r^2, H, W): the inverse of `PixelShuffle`."""

    def __init__(self, factor: int):
        self.factor = _at_least_one("PixelUnshuffle", "factor", factor)

    def forward(self, x: Any) -> Tensor:
        shape, r = tuple(x.shape), self.factor
        if len(shape) < 3 or shape[-1] % r or shape[-2] % r:
            raise ShapeError(f"PixelUnshuffle expects (..., C, H, W), H and W multiples of {r}, got shape {shape}")
        *lead, c, h, w = shape
        n = len(lead)
        x = ops.reshape(x, *lead, c, h // r, r, w // r, r)
        x = ops.transpose(x, *range(n), n, n + 2, n + 4, n + 1, n + 3)
        return ops.reshape(x, *lead, c * r * r, h // r, w // r)


class ChannelShuffle(Module):
    """(N, C, ...) with channels of `groups` groups in turns: the first of each, the second of each, ... (Zhang et al. 2018)."""

    def __init__(self, groups: int):
        self.groups = _at_least_one("ChannelShuffle", "groups", groups)

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) < 3 or shape[1] % self.groups:
            raise ShapeError(f"ChannelShuffle expects (N, C, ...) with a multiple of {self.groups} channels, got shape {shape}")
        x = ops.reshape(x, shape[0], self.groups, shape[1] // self.groups, *shape[2:])
        return ops.reshape(ops.swapaxes(x, 1, 2), *shape)


def _at_least_one(name: str, what: str, value: int) -> int:
    if value < 1:
        raise ShapeError(f"{name}: {what} is {value}, expected 1 or more")
    return value
