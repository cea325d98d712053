"""Norms of each sample by itself, and of neighbouring channels. Letters: `N` batch, `C` channels."""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module
from mpitrain.nn.norm import _Tracking

__all__ = ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LocalResponseNorm"]


class _InstanceNorm(_Tracking):
    """Normalises each channel of each sample, of (N, C, ...) or (C, ...), over what follows (Ulyanov et al. 2016).

    Defaults are PyTorch's: no weight and bias, and no running statistics. With them, eval uses the means over samples of what
    training saw; in a run they change once a step, by the mean over its micro-batches.
    """

    ndim = 0                                      # of a batch

    def __init__(self, features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = False,
                 track_running_stats: bool = False, *, bias: bool = True):
        self.eps = eps
        self._describe(features, momentum, affine, track_running_stats, bias)

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) == self.ndim - 1:
            return ops.squeeze(self.forward(ops.expand_dims(x, 0)), 0)
        if len(shape) != self.ndim or shape[1] != self.features:
            raise ShapeError(f"{type(self).__name__} expects {self.ndim} or {self.ndim - 1} dims with {self.features} channels, "
                             f"got shape {shape}")
        if not self.training and self.running is not None:
            return ops.batch_norm_inference(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        count = prod(shape[2:])
        if count < 2:
            raise ShapeError(f"{type(self).__name__}: each channel of a sample has {count} values in an input of shape {shape}, "
                             "expected 2 or more; their variance says nothing")
        if self.running is not None and shape[0]:
            values = (x.array if isinstance(x, Tensor) else x).reshape(*shape[:2], count).astype("float64")
            mean = values.mean(axis=2)
            squares = ((values - mean[:, :, None]) ** 2).sum(axis=2)
            self.running.record(mean.mean(axis=0), squares.mean(axis=0) / (count - 1))
        return ops.group_norm(x, self.features, self.weight, self.bias, eps=self.eps)


class InstanceNorm1d(_InstanceNorm):
    """Over (N, C, L) or (C, L)."""

    ndim = 3


class InstanceNorm2d(_InstanceNorm):
    """Over images (N, C, H, W) or (C, H, W)."""

    ndim = 4


class InstanceNorm3d(_InstanceNorm):
    """Over volumes (N, C, D, H, W) or (C, D, H, W)."""

    ndim = 5


class LocalResponseNorm(Module):
    """x / (k + alpha mean x^2)^beta, the mean over `size` neighbouring channels of (N, C, ...) (Krizhevsky et al. 2012).

    Channels beyond the first and the last count as 0.
    """

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0):
        if size < 1:
            raise ShapeError(f"local response norm: the size is {size} channels, expected 1 or more")
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) < 3:
            raise ShapeError(f"LocalResponseNorm expects (N, C, ...) of 3 dims or more, got shape {shape}")
        widths = [(0, 0), (self.size // 2, (self.size - 1) // 2), *((0, 0) for _ in shape[2:])]
        squares = ops.pad(ops.multiply(x, x), widths)
        total = squares[:, :shape[1]]
        for first in range(1, self.size):
            total = total + squares[:, first:first + shape[1]]
        return ops.divide(x, ops.power(total * (self.alpha / self.size) + self.k, self.beta))
