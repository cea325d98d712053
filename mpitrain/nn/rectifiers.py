"""Activations beyond the common ones of `nn.activation`: in pieces, gated, with numbers of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.nn import init
from mpitrain.nn.activation import OfEach, Softmax
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["CELU", "ELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LogSigmoid", "LogSoftmax", "Mish",
           "PReLU", "RReLU", "ReLU6", "SELU", "Softmax2d", "Softmin", "Softshrink", "Softsign", "Tanhshrink", "Threshold"]


class ELU(OfEach):
    """x, or alpha (exp(x) - 1) where x <= 0."""

    def __init__(self, alpha: float = 1.0):
        self.op = partial(ops.elu, alpha=alpha)


class SELU(OfEach):
    """`ops.selu`: the self-normalising ELU."""

    op = staticmethod(ops.selu)


class CELU(OfEach):
    """x, or alpha (exp(x / alpha) - 1) where x <= 0."""

    def __init__(self, alpha: float = 1.0):
        self.op = partial(ops.celu, alpha=alpha)


class Hardtanh(OfEach):
    """x limited to [low, high]."""

    def __init__(self, low: float = -1.0, high: float = 1.0):
        self.op = partial(ops.hardtanh, low=low, high=high)


class ReLU6(OfEach):
    """x limited to [0, 6]."""

    op = staticmethod(ops.relu6)


class Hardsigmoid(OfEach):
    """min(max(x + 3, 0), 6) / 6."""

    op = staticmethod(ops.hardsigmoid)


class Hardswish(OfEach):
    """x hardsigmoid(x)."""

    op = staticmethod(ops.hardswish)


class Mish(OfEach):
    """x tanh(log(1 + exp(x)))."""

    op = staticmethod(ops.mish)


class LogSigmoid(OfEach):
    """log(sigmoid(x))."""

    op = staticmethod(ops.log_sigmoid)


class Softsign(OfEach):
    """x / (1 + |x|)."""

    op = staticmethod(ops.softsign)


class Tanhshrink(OfEach):
    """x - tanh(x)."""

    op = staticmethod(ops.tanhshrink)


class Hardshrink(OfEach):
    """0 where |x| <= width, else x."""

    def __init__(self, width: float = 0.5):
        self.op = partial(ops.hardshrink, width=width)


class Softshrink(OfEach):
    """0 where |x| <= width, else x nearer to 0 by width."""

    def __init__(self, width: float = 0.5):
        self.op = partial(ops.softshrink, width=width)


class Threshold(OfEach):
    """x where x > bound, else value."""

    def __init__(self, bound: float, value: float):
        self.op = partial(ops.threshold, bound=bound, value=value)


class PReLU(Module):
    """x, or a trained weight times x where x <= 0: one weight, or one for each of `count` channels of x (N, C, ...)."""

    def __init__(self, count: int = 1, slope: float = 0.25):
        self.by_position = count == 1
        self.weight = Parameter((count,), init.constant(slope))

    def forward(self, x: Any) -> Tensor:
        return ops.prelu(x, self.weight)


class RReLU(Module):
    """x, or s x where x <= 0: in training s is uniform in [low, high), for each element of x (B, ...), and in eval their mean.

    The numbers are functions of (seed, step, sample, the layer's name), as the masks of `Dropout` are.
    """

    def __init__(self, low: float = 1 / 8, high: float = 1 / 3):
        if not low <= high:
            raise ConfigError(f"RReLU: low is {low} and high {high}, expected low <= high; swap them")
        self.low, self.high = low, high

    def forward(self, x: Any) -> Tensor:
        if self.training:
            return ops.rrelu(x, self.path, self.low, self.high)
        return ops.leaky_relu(x, (self.low + self.high) / 2)


class GLU(Module):
    """a sigmoid(b), of the halves a and b of x along `dim`."""

    def __init__(self, dim: int = -1):
        self.dim, self.by_position = dim, dim == -1

    def forward(self, x: Any) -> Tensor:
        return ops.glu(x, self.dim)


class LogSoftmax(Softmax):
    """log(softmax(x)) along `dim`."""

    def forward(self, x: Any) -> Tensor:
        return ops.log_softmax(x, dim=self.dim)


class Softmin(Softmax):
    """softmax(-x) along `dim`."""

    def forward(self, x: Any) -> Tensor:
        return ops.softmin(x, dim=self.dim)


class Softmax2d(Softmax):
    """softmax over the channels of images (N, C, H, W) or (C, H, W)."""

    def __init__(self) -> None:
        super().__init__(-3)
