"""Activations as modules, for Sequential, and by name, for a config."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.nn.module import Module
from mpitrain.registry import Registry

__all__ = ["ACTIVATIONS", "GELU", "LeakyReLU", "ReLU", "SiLU", "Sigmoid", "Softmax", "Softplus", "Tanh"]

ACTIVATIONS: Registry[Callable[[], Module]] = Registry("activation")


class OfEach(Module):
    """A function of each element."""

    by_position = by_element = True
    op: Callable[[Any], Tensor]

    def forward(self, x: Any) -> Tensor:
        return self.op(x)


@ACTIVATIONS.register("relu")
class ReLU(OfEach):
    """max(x, 0)."""

    op = staticmethod(ops.relu)


@ACTIVATIONS.register("leaky_relu")
class LeakyReLU(OfEach):
    """x, or slope x where x < 0."""

    def __init__(self, slope: float = 0.01):
        self.op = partial(ops.leaky_relu, slope=slope)


@ACTIVATIONS.register("gelu")
class GELU(OfEach):
    """x times the normal distribution function of x; `approximate` is "none" (erf) or "tanh"."""

    def __init__(self, approximate: str = "none"):
        self.op = partial(ops.gelu, approximate=approximate)


ACTIVATIONS.register("gelu_tanh")(partial(GELU, "tanh"))


@ACTIVATIONS.register("silu")
class SiLU(OfEach):
    """x sigmoid(x)."""

    op = staticmethod(ops.silu)


@ACTIVATIONS.register("tanh")
class Tanh(OfEach):
    """tanh(x)."""

    op = staticmethod(ops.tanh)


@ACTIVATIONS.register("sigmoid")
class Sigmoid(OfEach):
    """1 / (1 + exp(-x))."""

    op = staticmethod(ops.sigmoid)


@ACTIVATIONS.register("softplus")
class Softplus(OfEach):
    """log(1 + exp(x)); see `ops.softplus`."""

    def __init__(self, beta: float = 1.0, threshold: float = math.inf):
        plain = beta == 1.0 and threshold == math.inf
        self.op = ops.softplus if plain else partial(ops.softplus, beta=beta, threshold=threshold)


class Softmax(Module):
    """exp(x) / sum exp(x) along `dim`; losses want what comes before it."""

    def __init__(self, dim: int = -1):
        self.dim, self.by_position = dim, dim == -1

    def forward(self, x: Any) -> Tensor:
        return ops.softmax(x, dim=self.dim)


for _name, _class in {
        "celu": "CELU", "elu": "ELU", "hardsigmoid": "Hardsigmoid", "hardswish": "Hardswish", "hardtanh": "Hardtanh",
        "log_sigmoid": "LogSigmoid", "mish": "Mish", "relu6": "ReLU6", "selu": "SELU", "softsign": "Softsign",
        "tanhshrink": "Tanhshrink"}.items():
    ACTIVATIONS.register_later(_name, f"mpitrain.nn.rectifiers:{_class}")
