"""Initial values: each a function of (key, element index), so that any slice of a parameter can be made alone.

An initialiser is called with the key of one parameter, the first element and the number of elements wanted, and the
parameter's global shape; it answers float64 values. The fans follow PyTorch: dim 0 is the outputs, dim 1 the inputs,
and what follows is the receptive field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import Array, asnumpy
from mpitrain.errors import ArgumentError, ShapeError
from mpitrain.kernels import random
from mpitrain.ops.inputs import door

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


def itself(values: Initialiser, name: str) -> Initialiser:
    """`values`, which is called `name`, and says so to whoever calls it to get an initialiser."""
    def initialiser(*place: Any, **named: Any) -> Array:
        if len(place) != 5 or named:
            raise ArgumentError(f"nn.init.{name} is an initialiser, no function that makes one; write nn.init.{name} without "
                                "brackets")
        return values(*place)
    return initialiser


@door
def constant(value: float) -> Initialiser:
    """Every element is `value`."""
    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        return xp.full(count, value, dtype=xp.float64)
    return values


zeros = itself(constant(0.0), "zeros")
ones = itself(constant(1.0), "ones")


@door
def uniform(bound: float) -> Initialiser:
    """Uniform in [-bound, bound)."""
    return _uniform(lambda shape: bound)


@door
def normal(std: float, mean: float = 0.0) -> Initialiser:
    """Normal with this mean and standard deviation. ShapeError where that is negative, or 0 beside a mean."""
    if std < 0 or (std == 0 and mean != 0):
        raise ShapeError(f"normal: std is {std} and mean {mean}, expected std > 0, which comes first; write normal(std=..., "
                         "mean=...)")
    return _normal(lambda shape: std, mean)


def fan_in_uniform(shape: Shape) -> Initialiser:
    """Uniform in ±1/sqrt(fan in) of a weight of `shape`: PyTorch's default for the biases of Linear and Conv."""
    fan_in, _ = fans(shape)
    return uniform(1.0 / math.sqrt(fan_in) if fan_in else 0.0)


@door
def kaiming_uniform(slope: float = 0.0, fan: str = "in") -> Initialiser:
    """He et al. 2015: uniform, variance gain^2 / fan, for a leaky ReLU of this negative slope."""
    return _uniform(lambda shape: math.sqrt(3.0) * _kaiming_std(shape, slope, fan))


@door
def kaiming_normal(slope: float = 0.0, fan: str = "in") -> Initialiser:
    """He et al. 2015: normal, variance gain^2 / fan, for a leaky ReLU of this negative slope."""
    return _normal(lambda shape: _kaiming_std(shape, slope, fan))


@door
def xavier_uniform(gain: float = 1.0) -> Initialiser:
    """Glorot and Bengio 2010: uniform, variance 2 gain^2 / (fan in + fan out)."""
    return _uniform(lambda shape: gain * math.sqrt(6.0 / max(1, sum(fans(shape)))))


@door
def xavier_normal(gain: float = 1.0) -> Initialiser:
    """Glorot and Bengio 2010: normal, variance 2 gain^2 / (fan in + fan out)."""
    return _normal(lambda shape: gain * math.sqrt(2.0 / max(1, sum(fans(shape)))))


default_weight = itself(kaiming_uniform(slope=math.sqrt(5.0)), "default_weight")
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


@door
def calculate_gain(nonlinearity: str, slope: float = 0.01) -> float:
    """The gain of PyTorch's name for a nonlinearity: what keeps the variance of a layer's output that goes through it."""
    known = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": math.sqrt(2.0), "selu": 0.75,
             "leaky_relu": math.sqrt(2.0 / (1.0 + slope ** 2))}
    if nonlinearity not in known:
        raise ShapeError(f'a gain is known for {", ".join(known)}, not "{nonlinearity}"')
    return known[nonlinearity]


@door
def truncated_normal(std: float = 1.0, mean: float = 0.0, low: float = -2.0, high: float = 2.0) -> Initialiser:
    """Normal with this mean and standard deviation, of which only values in [low, high] are taken; PyTorch's `trunc_normal_`."""
    from statistics import NormalDist
    if not (std > 0.0 and low < high):
        raise ShapeError(f"truncated_normal wants std > 0 and low < high, found {std}, {low} and {high}")
    normal = NormalDist(mean, std)
    first, last = normal.cdf(low), normal.cdf(high)

    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        share = first + (last - first) * asnumpy(random.uniform(key, start, count, xp))
        share = np.clip(share, np.nextafter(0.0, 1.0), np.nextafter(1.0, 0.0))
        found = np.fromiter(map(normal.inv_cdf, share.tolist()), np.float64, count)
        return xp.asarray(np.clip(found, low, high))
    return values


def of_whole(make: Callable[[int, Shape], Any]) -> Initialiser:
    """For values that follow from the whole parameter: each part is cut out of ``make(key, shape)``, which one part after
    another of the same parameter uses again."""
    made = cache_of_one(make)

    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        return xp.asarray(made(key, shape)[start:start + count])
    return values


def cache_of_one(make: Callable[[int, Shape], Any]) -> Callable[[int, Shape], Any]:
    return lru_cache(maxsize=1)(lambda key, shape: make(key, shape).reshape(-1))


@door
def orthogonal(gain: float = 1.0) -> Initialiser:
    """Rows or columns (dim 0, and the rest), whichever are fewer, are orthogonal and of length `gain` (Saxe et al., 2014).

    The Q of a normal matrix, with the signs that make it uniform over such matrices; a rank that has a part makes the whole.
    """
    def whole(key: int, shape: Shape) -> Any:
        fans(shape)
        rows, columns = shape[0], math.prod(shape[1:])
        matrix = random.normal(key, 0, rows * columns, np).reshape(rows, columns)
        q, r = np.linalg.qr(matrix if rows >= columns else matrix.T)
        q *= np.where(np.diagonal(r) < 0, -1.0, 1.0)
        return np.ascontiguousarray(q if rows >= columns else q.T) * gain
    return of_whole(whole)


@door
def sparse(sparsity: float, std: float = 0.01) -> Initialiser:
    """Normal, with this share of each column (dim 1) zero (Martens, 2010); of matrices."""
    if not 0.0 <= sparsity <= 1.0:
        raise ShapeError(f"sparse wants a share in [0, 1], found {sparsity}")

    def whole(key: int, shape: Shape) -> Any:
        if len(shape) != 2:
            raise ShapeError(f"sparse is for matrices, this parameter has shape {shape}")
        size, zeros = math.prod(shape), math.ceil(sparsity * shape[0])
        found = random.normal(key, 0, size, np).reshape(shape) * std
        order = np.argsort(random.uniform(key ^ 1, 0, size, np).reshape(shape), axis=0)
        np.put_along_axis(found, order[:zeros], 0.0, 0)
        return found
    return of_whole(whole)


def _eye(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
    if len(shape) != 2:
        raise ShapeError(f"eye is for matrices, this parameter has shape {shape}")
    places = xp.arange(start, start + count)
    return (places // shape[1] == places % shape[1]).astype(xp.float64)


eye = itself(_eye, "eye")
"""The identity, of matrices."""


@door
def dirac(groups: int = 1) -> Initialiser:
    """A convolution that hands on its first channels, of each of `groups` (Zagoruyko and Komodakis, 2017)."""
    def values(key: int, start: int, count: int, shape: Shape, xp: Any) -> Array:
        if not 3 <= len(shape) <= 5 or shape[0] % groups:
            raise ShapeError(f"dirac is for weights of convolutions whose outputs divide by {groups} groups, this one has shape "
                             f"{shape}")
        indices = np.unravel_index(np.arange(start, start + count), shape)
        found = indices[0] % (shape[0] // groups) == indices[1]
        for index, n in zip(indices[2:], shape[2:]):
            found &= index == n // 2
        return xp.asarray(found.astype(np.float64))
    return values


def __getattr__(name: str) -> Any:
    if name.endswith("_") and not name.startswith("_"):
        ours = {"trunc_normal_": "truncated_normal"}.get(name, name[:-1])
        example = f"nn.init.{ours}" if ours in globals() else "an initialiser of nn.init"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: initialize() fills the parameters; "
                             f"give {example} to one before, such as layer.weight.init = ...")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
