"""Normalisation layers. Letters: `N` batch, `C` channels or features.

Batch norm's running statistics change in each training forward, as PyTorch's do, but in a run once a step (`nn.statistics`): a
step of many micro-batches on many ranks then counts as one batch. Recomputing a block does not count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.backend.dtype import statistics_dtype
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.basic import Dropout
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Buffer, Parameter
from mpitrain.nn.statistics import Running
from mpitrain.registry import Registry

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "LayerNorm", "RMSNorm", "SyncBatchNorm"]


FUSED = (None, "relu", "relu6", "hardswish", "silu")      # what `ops.batch_norm` computes in the same passes


class _Tracking(Module):
    """The parameters and running statistics of a norm of channels. `momentum` None keeps the mean over all steps.

    Without `affine` there is no weight and bias, without `track_running_stats` no buffer: eval then normalises as training does.
    """

    def _describe(self, features: int, momentum: float | None, affine: bool, track_running_stats: bool, bias: bool) -> None:
        if momentum is not None and not 0.0 < momentum <= 1.0:
            raise ConfigError(f"the momentum of batch norm lies in (0, 1], not {momentum}")
        self.features = features
        self.weight = Parameter((features,), init.ones, rounded=False) if affine else None
        self.bias = Parameter((features,), init.zeros, rounded=False) if affine and bias else None
        self.running: Running | None = None
        if track_running_stats:
            self.running_mean = Buffer((features,), init.zeros)
            self.running_var = Buffer((features,), init.ones)
            steps = None
            if momentum is None:
                steps = self.num_batches_tracked = Buffer((), init.zeros)
            self.running = Running([self.running_mean, self.running_var], 0.0 if momentum is None else momentum, steps)

    def resized(self) -> None:
        leaf = self.weight if self.running is None else self.running_mean
        if leaf is not None:
            self.features = leaf.global_shape[0]


class _BatchNorm(_Tracking):
    """Normalises each channel (dim 1) by its mean and variance over the micro-batch, in eval by the running ones.

    Parameters, buffers, eps and momentum as in PyTorch; the running variance is the unbiased one. `activation` is the name of one
    that follows (see `nn.ACTIVATIONS`): "relu", "relu6", "hardswish" and "silu" are computed in the same passes over memory. What
    comes around a residual block is added before it (`residual`).
    """

    ndims: tuple[int, ...] = ()                   # numbers of dims that an input may have

    def __init__(self, features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, *, bias: bool = True, activation: str | None = None):
        if not (isinstance(eps, int | float | np.floating) and eps > 0):
            raise ConfigError(f"the eps of batch norm is a number of more than 0, not {eps!r}")
        self.eps, self.fused = eps, activation if activation in FUSED else None
        self.after = None if activation == self.fused else ACTIVATIONS.resolve(str(activation))()
        self._describe(features, momentum, affine, track_running_stats, bias)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) not in self.ndims or shape[1] != self.features:
            raise ShapeError(f"{type(self).__name__} expects {' or '.join(map(str, self.ndims))} dims with {self.features} "
                             f"channels in dim 1, got shape {shape}")
        y = self._normalised(x, residual)
        return y if self.after is None else self.after(y)

    def _normalised(self, x: Any, residual: Any) -> Tensor:
        shape = tuple(x.shape)
        if not self.training and self.running is not None:
            return ops.batch_norm_inference(x, self.running_mean, self.running_var, self.weight, self.bias, residual=residual,
                                            eps=self.eps, activation=self.fused)
        tally = None if self.running is None else self.running.tally_here()
        y, mean, var, count = ops.batch_norm(x, self.weight, self.bias, residual=residual, eps=self.eps, activation=self.fused,
                                             reduce=None if self.across is None else self.across.reduce, tally=tally)
        # The count is the sum over the ranks: on a device a number there, which only a rank with fewer than two values waits for.
        if array_module(mean) is np or prod(shape) < 2 * shape[1]:
            count = float(count)
        if isinstance(count, float) and count < 2:
            raise ShapeError(f"{type(self).__name__}: training needs more than one value for each channel over all ranks, "
                             f"the input here is {shape}; use larger micro-batches")
        if self.running is not None and tally is None:
            self.running.record(mean, var * (count / (count - 1)))
        return y


class BatchNorm1d(_BatchNorm):
    """Over (N, C) or (N, C, L)."""

    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Over images (N, C, H, W)."""

    ndims = (4,)


class BatchNorm3d(_BatchNorm):
    """Over volumes (N, C, D, H, W)."""

    ndims = (5,)


class SyncBatchNorm(_BatchNorm):
    """Over the micro-batches of all ranks that run at the same time.

    Whoever knows the ranks sets `across`. Every rank must then run the layer equally often. Without it the layer is an ordinary
    batch norm.
    """

    ndims = (2, 3, 4, 5)

    def __init__(self, features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, *,
                 bias: bool = True, activation: str | None = None):
        super().__init__(features, eps, momentum, affine, bias=bias, activation=activation)      # eval does not ask other ranks


class LayerNorm(Module):
    """Over the last dims, of sizes `shape` (Ba, Kiros, Hinton 2016)."""

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True, *, elementwise_affine: bool = True):
        self.eps = eps
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.by_position = len(self.shape) == 1
        self.weight = Parameter(self.shape, init.ones, rounded=False) if elementwise_affine else None
        self.bias = Parameter(self.shape, init.zeros, rounded=False) if bias and elementwise_affine else None

    def forward(self, x: Any, residual: Any = None, dropping: Dropout | None = None) -> Any:
        """The norm of x; where `residual` is given, (residual + dropping(x), the norm of that), in one pass over memory."""
        weight = _ones(self.shape, x) if self.weight is None else self.weight
        if residual is not None:
            if dropping is None or not dropping.drops:
                return ops.add_layer_norm(x, residual, weight, self.bias, eps=self.eps)
            return ops.add_layer_norm(x, residual, weight, self.bias, eps=self.eps, dropout=dropping.p, layer=dropping.path,
                                      part=dropping.part, positions=dropping.places(x))
        return ops.layer_norm(x, weight, self.bias, eps=self.eps)


class GroupNorm(Module):
    """Over groups of channels of (N, C, ...) (Wu and He 2018)."""

    def __init__(self, groups: int, channels: int, eps: float = 1e-5, affine: bool = True, *, bias: bool = True):
        if groups < 1 or channels % groups:
            raise ShapeError(f"{channels} channels cannot be cut into {groups} groups; channels must be a multiple of groups")
        self.groups, self.eps = groups, eps
        self.weight = Parameter((channels,), init.ones, rounded=False) if affine else None
        self.bias = Parameter((channels,), init.zeros, rounded=False) if affine and bias else None

    def forward(self, x: Any) -> Tensor:
        return ops.group_norm(x, self.groups, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """x / sqrt(mean x^2 + eps), times a gain, over the last dims, of sizes `shape` (Zhang and Sennrich 2019).

    `eps` None, as PyTorch's: the distance from 1 to the next number of x's dtype.
    """

    def __init__(self, shape: int | Sequence[int], eps: float | None = None, *, elementwise_affine: bool = True):
        self.eps = eps
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.by_position = len(self.shape) == 1
        self.weight = Parameter(self.shape, init.ones, rounded=False) if elementwise_affine else None

    def forward(self, x: Any) -> Tensor:
        weight = _ones(self.shape, x) if self.weight is None else self.weight
        return ops.rms_norm(x, weight, eps=float(np.finfo(statistics_dtype(x.dtype)).eps) if self.eps is None else self.eps)


def _ones(shape: tuple[int, ...], x: Any) -> Array:
    return array_module(x.array if isinstance(x, Tensor) else x).ones(shape, statistics_dtype(x.dtype))


NORMS: Registry[Callable[..., Module]] = Registry("norm")
NORMS.register("batch")(BatchNorm2d)
NORMS.register("sync")(SyncBatchNorm)
"""Normalisations of images by name, each made from the number of channels, and `activation`, a name or None."""
