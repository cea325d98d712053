"""Normalisation layers. Letters: `N` batch, `C` channels or features.

Batch norm's running statistics change once a step (`nn.statistics`), not in forward: a step of many micro-batches on many
ranks then counts as one batch, and recomputing a block does not count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Dropout
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Buffer, Parameter
from mpitrain.nn.statistics import Running
from mpitrain.registry import Registry

__all__ = ["BatchNorm1d", "BatchNorm2d", "GroupNorm", "LayerNorm", "RMSNorm", "SyncBatchNorm"]


class _BatchNorm(Module):
    """Normalises each channel (dim 1) by its mean and variance over the micro-batch, in eval by the running ones.

    Parameters, buffers, eps and momentum as in PyTorch; the running variance is the unbiased one. ReLU can be computed in the
    same passes over memory (`activation`), and what comes around a residual block be added before it (`residual`).
    """

    ndims: tuple[int, ...] = ()                   # numbers of dims that an input may have

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1, *, activation: str | None = None):
        if activation not in (None, "relu"):
            raise ConfigError(f'batch norm takes "relu" as its activation, or None, not "{activation}"; put others after it')
        if not 0.0 < momentum <= 1.0:
            raise ConfigError(f"the momentum of batch norm lies in (0, 1], not {momentum}")
        self.features, self.eps, self.relu = features, eps, activation == "relu"
        self.weight = Parameter((features,), init.ones)
        self.bias = Parameter((features,), init.zeros)
        self.running_mean = Buffer((features,), init.zeros)
        self.running_var = Buffer((features,), init.ones)
        self.running = Running([self.running_mean, self.running_var], momentum)

    def forward(self, x: Any, residual: Any = None) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) not in self.ndims or shape[1] != self.features:
            raise ShapeError(f"{type(self).__name__} expects {' or '.join(map(str, self.ndims))} dims with {self.features} "
                             f"channels in dim 1, got shape {shape}")
        if not self.training:
            return ops.batch_norm_inference(x, self.running_mean, self.running_var, self.weight, self.bias, residual=residual,
                                            relu=self.relu, eps=self.eps)
        y, mean, var, count = ops.batch_norm(x, self.weight, self.bias, residual=residual, relu=self.relu, eps=self.eps,
                                             reduce=None if self.across is None else self.across.reduce)
        count = float(count)                      # The count is the sum over the ranks.
        if count < 2:
            raise ShapeError(f"{type(self).__name__}: training needs more than one value for each channel over all ranks, "
                             f"the input here is {shape}; use larger micro-batches")
        self.running.record(mean, var * (count / (count - 1)))
        return y


class BatchNorm1d(_BatchNorm):
    """Over (N, C) or (N, C, L)."""

    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Over images (N, C, H, W)."""

    ndims = (4,)


class SyncBatchNorm(_BatchNorm):
    """Over the micro-batches of all ranks that run at the same time.

    Whoever knows the ranks sets `across`. Every rank must then run the layer equally often. Without it the layer is an ordinary
    batch norm.
    """

    ndims = (2, 3, 4)


class LayerNorm(Module):
    """Over the last dims, of sizes `shape` (Ba, Kiros, Hinton 2016)."""

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True):
        self.eps = eps
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        self.by_position = len(sizes) == 1
        self.weight = Parameter(sizes, init.ones)
        self.bias = Parameter(sizes, init.zeros) if bias else None

    def forward(self, x: Any, residual: Any = None, dropping: Dropout | None = None) -> Any:
        """The norm of x; where `residual` is given, (residual + dropping(x), the norm of that), in one pass over memory."""
        if residual is not None:
            if dropping is None or not dropping.drops:
                return ops.add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)
            return ops.add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps, dropout=dropping.p, layer=dropping.path,
                                      part=dropping.part, positions=dropping.places(x))
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class GroupNorm(Module):
    """Over groups of channels of (N, C, ...) (Wu and He 2018)."""

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        if groups < 1 or channels % groups:
            raise ShapeError(f"{channels} channels cannot be cut into {groups} groups; channels must be a multiple of groups")
        self.groups, self.eps = groups, eps
        self.weight = Parameter((channels,), init.ones)
        self.bias = Parameter((channels,), init.zeros)

    def forward(self, x: Any) -> Tensor:
        return ops.group_norm(x, self.groups, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """x / sqrt(mean x^2 + eps), times a gain, over the last dim (Zhang and Sennrich 2019)."""

    by_position = True

    def __init__(self, width: int, eps: float = 1e-6):
        self.eps = eps
        self.weight = Parameter((width,), init.ones)

    def forward(self, x: Any) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)


NORMS: Registry[Callable[..., Module]] = Registry("norm")
NORMS.register("batch")(BatchNorm2d)
NORMS.register("sync")(SyncBatchNorm)
"""Normalisations of images by name, each made from the number of channels, and `activation`, None or "relu"."""
