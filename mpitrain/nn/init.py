"""Initial values: each a function of (key, element index), so that any slice of a parameter can be made alone.

An initialiser is called with the key of one parameter, the first element and the number of elements wanted, and the
parameter's global shape; it answers float64 values. The fans follow PyTorch: dim 0 is the outputs, dim 1 the inputs,
and what follows is the receptive field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import random

Shape: TypeAlias = tuple[int, ...]
Initialiser: TypeAlias = Callable[[int, int, int, Shape, Any], Array]     # (key, start, count, global shape, xp)


def _uniform(bound: Callable[[Shape], float]) -> Initialiser:
    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        return (2.0 * random.uniform(key, start, count, xp) - 1.0) * bound(shape)
    return values


def _normal(std: Callable[[Shape], float], mean: float = 0.0) -> Initialiser:
    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        return random.normal(key, start, count, xp) * std(shape) + mean
    return values


def constant(value: float) -> Initialiser:
    """Every element is `value`."""
    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        return xp.full(count, value, dtype=xp.float64)
    return values


zeros = constant(0.0)
ones = constant(1.0)


def uniform(bound: float) -> Initialiser:
    """Uniform in [-bound, bound)."""
    return _uniform(lambda shape: bound)


def normal(std: float, mean: float = 0.0) -> Initialiser:
    """Normal with this mean and standard deviation."""
    return _normal(lambda shape: std, mean)


def fan_in_uniform(shape: Shape) -> Initialiser:
    """Uniform in ±1/sqrt(fan in) of a weight of `shape`: PyTorch's default for the biases of Linear and Conv."""
    fan_in, _ = fans(shape)
    return uniform(1.0 / math.sqrt(fan_in) if fan_in else 0.0)


def kaiming_uniform(slope: float = 0.0, fan: str = "in") -> Initialiser:
    """He et al. 2015: uniform, variance gain^2 / fan, for a leaky ReLU of this negative slope."""
    return _uniform(lambda shape: math.sqrt(3.0) * _kaiming_std(shape, slope, fan))


def kaiming_normal(slope: float = 0.0, fan: str = "in") -> Initialiser:
    """He et al. 2015: normal, variance gain^2 / fan, for a leaky ReLU of this negative slope."""
    return _normal(lambda shape: _kaiming_std(shape, slope, fan))


def xavier_uniform(gain: float = 1.0) -> Initialiser:
    """Glorot and Bengio 2010: uniform, variance 2 gain^2 / (fan in + fan out)."""
    return _uniform(lambda shape: gain * math.sqrt(6.0 / max(1, sum(fans(shape)))))


def xavier_normal(gain: float = 1.0) -> Initialiser:
    """Glorot and Bengio 2010: normal, variance 2 gain^2 / (fan in + fan out)."""
    return _normal(lambda shape: gain * math.sqrt(2.0 / max(1, sum(fans(shape)))))


default_weight = kaiming_uniform(slope=math.sqrt(5.0))
"""PyTorch's default for the weights of Linear and Conv: uniform in ±1/sqrt(fan in)."""


def of_each(values: Initialiser) -> Initialiser:
    """For parameters that stack several along dim 0: each is filled as one of the shape of the rest."""
    return lambda key, start, count, shape, xp: values(key, start, count, shape[1:], xp)


def without_row(values: Initialiser, row: int) -> Initialiser:
    """`values`, but zeros in this row of a matrix."""
    def made(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        found = values(key, start, count, shape, xp)
        first, last = (max(0, min(count, place * shape[1] - start)) for place in (row, row + 1))
        found[first:last] = 0.0
        return found
    return made


def fans(shape: Shape) -> tuple[int, int]:
    """(fan in, fan out) of a weight; ShapeError for fewer than two dims."""
    if len(shape) < 2:
        raise ShapeError(f"fan in and fan out need a weight of at least 2 dims, this one has shape {shape}; "
                         "use uniform(bound), normal(std) or constant(value)")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _kaiming_std(shape: Shape, slope: float, fan: str) -> float:
    choices = dict(zip(("in", "out"), fans(shape)))
    if fan not in choices:
        raise ShapeError(f'fan is "in" or "out", not "{fan}"')
    return math.sqrt(2.0 / (1.0 + slope ** 2)) / math.sqrt(max(1, choices[fan]))
