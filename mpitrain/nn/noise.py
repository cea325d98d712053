"""Dropout of whole channels and samples, and dropout that keeps mean and variance.

Every mask is a function of (seed, step, sample, the layer's name): the same bits on any number of ranks, as in `Dropout`.
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.nn.basic import probability
from mpitrain.nn.module import Module
from mpitrain.ops.rectifiers import SELU_ALPHA, SELU_SCALE

__all__ = ["AlphaDropout", "DropPath", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout"]


class _Noise(Module):
    """A mask, drawn for the first `kept` dims of x and the same along the others."""

    kept: int | None = None                       # None: all dims

    def __init__(self, p: float = 0.5):
        self.p = probability(p)

    def mask(self, x: Any) -> Array:
        """0 with probability p, else 1 / (1 - p), in the shape of x but for dims of size 1."""
        shape = tuple(x.shape)
        kept = len(shape) if self.kept is None else self.kept
        if len(shape) < max(kept, 1):
            raise ShapeError(f"{type(self).__name__}: the input has shape {shape}, expected {kept or 1} dims or more")
        xp = array_module(x.array if isinstance(x, Tensor) else x)
        ones = xp.ones((*shape[:kept], *(1 for _ in shape[kept:])), x.dtype)
        dropped: Array = ops.dropout(ones, self.p, self.path).array
        return dropped


class _Features(_Noise):
    """Drops whole channels of (N, C, ...): neighbours in one carry much the same (Tompson et al. 2015)."""

    kept = 2
    ndim = 0

    def forward(self, x: Any) -> Any:
        if len(x.shape) != self.ndim:
            raise ShapeError(f"{type(self).__name__} expects {self.ndim} dims (N, C, ...), got shape {tuple(x.shape)}")
        return ops.multiply(x, self.mask(x)) if self.training and self.p else x


class Dropout1d(_Features):
    """Drops channels of (N, C, L)."""

    ndim = 3


class Dropout2d(_Features):
    """Drops channels of images (N, C, H, W)."""

    ndim = 4


class Dropout3d(_Features):
    """Drops channels of volumes (N, C, D, H, W)."""

    ndim = 5


class DropPath(_Noise):
    """Stochastic depth: x (N, ...) is 0 for a sample with probability p, else x / (1 - p) (Huang et al. 2016).

    For the branch beside a residual: ``x + self.drop_path(self.block(x))``.
    """

    kept = 1
    by_position = True

    def __init__(self, p: float = 0.1):
        super().__init__(p)

    def forward(self, x: Any) -> Any:
        return ops.multiply(x, self.mask(x)) if self.training and self.p else x


class AlphaDropout(_Noise):
    """Sets elements to the limit of SELU at -inf, and scales so that mean and variance stay (Klambauer et al. 2017)."""

    def forward(self, x: Any) -> Any:
        if not (self.training and self.p):
            return x
        keep, limit = self.mask(x) * (1 - self.p), -SELU_ALPHA * SELU_SCALE
        keep = (keep > 0.5).astype(x.dtype)                                       # (1 / (1 - p)) (1 - p) may not be 1
        scale = 1 / math.sqrt((1 - self.p) * (1 + self.p * limit * limit))
        shift = (1 - keep) * (scale * limit) - scale * self.p * limit
        return ops.add(ops.multiply(x, keep * scale), shift)


class FeatureAlphaDropout(AlphaDropout):
    """Alpha dropout of whole channels of (N, C, ...)."""

    kept = 2
