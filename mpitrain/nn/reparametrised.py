"""Layers whose weight is computed from other numbers in each forward: weight norm and spectral norm.

Both return a layer that has the given one inside, and work as it does: in checkpoints, with sharding, at any number of ranks. A
weight that is computed cannot be cut over ranks (mesh.tp), which `mesh.plan` refuses.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, stream_key
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import random
from mpitrain.nn import init
from mpitrain.nn.conv import _ConvTranspose
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Another, Buffer, Described, Parameter
from mpitrain.nn.statistics import Running

__all__ = ["spectral_norm", "weight_norm"]

START_ITERATIONS = 15                             # of the power method before the first step, as in PyTorch


def weight_norm(layer: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """`layer` with weight = g v / |v|, |v| over all dims but `dim` (None: over all); Salimans and Kingma, 2016.

    Parameters are `weight_g` and `weight_v`, and those of the layer under "layer.". v starts as the weight would, g as its norm.
    """
    return _WeightNorm(layer, name, dim)


def spectral_norm(layer: Module, name: str = "weight", iterations: int = 1, eps: float = 1e-12, dim: int | None = None) -> Module:
    """`layer` with its weight, as a matrix with `dim` first, divided by its largest singular value; Miyato et al., 2018.

    The singular vectors are followed by `iterations` of the power method in each training forward, in a run from the same start
    in each micro-batch of a step, and kept in the buffers `u` and `v`; eval uses them as they are. `dim` is 0, but 1 for
    transposed convolutions, by default.
    """
    return _SpectralNorm(layer, name, iterations, eps, dim)


class _Computed(Module):
    """A layer inside, one of whose parameters is another number in each forward."""

    def __init__(self, layer: Module, name: str):
        weight = vars(layer).get(name)
        if not isinstance(weight, Parameter) or weight.allocated or len(weight.shape) < 2:
            raise ConfigError(f'{type(layer).__name__} has no parameter "{name}" of 2 dims or more without memory to normalise')
        self.by_position, self.name = layer.by_position, name
        self._take(weight)
        self.layer = layer
        delattr(layer, name)

    def _take(self, weight: Parameter) -> None:
        """Makes attributes of the weight, before those of the layer."""

    def _weight(self) -> Tensor:
        raise NotImplementedError

    def replace(self, leaf: Described, by: Described) -> None:
        super().replace(leaf, by)
        for value in vars(self).values():         # what starts from the weight starts from its twin
            if isinstance(value, (Magnitude, Singular)) and value.of is leaf:
                assert isinstance(by, Parameter)
                value.of = by

    def forward(self, *inputs: Any, **named: Any) -> Any:
        setattr(self.layer, self.name, self._weight())
        try:
            return self.layer(*inputs, **named)
        finally:
            delattr(self.layer, self.name)        # with its graph


class _WeightNorm(_Computed):
    def __init__(self, layer: Module, name: str, dim: int | None):
        self.dim = dim
        super().__init__(layer, name)

    def _take(self, weight: Parameter) -> None:
        ndim = len(weight.shape)
        if self.dim is not None and not -ndim <= self.dim < ndim:
            raise ShapeError(f"weight_norm: dim {self.dim} of a weight of shape {weight.shape}")
        others = tuple(d for d in range(ndim) if self.dim is None or d != self.dim % ndim)
        self.weight_g, self.weight_v, self.others = Magnitude(weight, others), weight, others

    def _weight(self) -> Tensor:
        v = self.weight_v
        return v * (self.weight_g / ops.sqrt(ops.sum(v * v, dim=self.others, keepdim=True)))


class Magnitude(Parameter):
    """The norms of another parameter's initial values over some of its dims."""

    __slots__ = ("dims", "of")

    def __init__(self, of: Parameter, dims: tuple[int, ...]):
        super().__init__([1 if d in dims else n for d, n in enumerate(of.global_shape)], init.ones)
        self.of, self.dims = of, dims

    def fill(self, seed: int, out: Array, start: int, xp: Any) -> None:
        norms = xp.sqrt((_initial(self.of, seed, xp) ** 2).sum(axis=self.dims))
        out[...] = norms.reshape(-1)[start:start + len(out)]

    def like(self, another: Another) -> Described:
        of: Any = another(self.of)
        return Magnitude(of, self.dims)

    def twin(self, name: str) -> Parameter:
        other = Magnitude(self.of, self.dims)
        other.twin_of = self.twin_of or name
        return other


class _SpectralNorm(_Computed):
    def __init__(self, layer: Module, name: str, iterations: int, eps: float, dim: int | None):
        if iterations < 1:
            raise ConfigError(f"spectral_norm: {iterations} iterations, expected 1 or more")
        self.iterations, self.eps = iterations, eps
        self.dim = (1 if isinstance(layer, _ConvTranspose) else 0) if dim is None else dim
        super().__init__(layer, name)

    def _take(self, weight: Parameter) -> None:
        if not -len(weight.shape) <= self.dim < len(weight.shape):
            raise ShapeError(f"spectral_norm: dim {self.dim} of a weight of shape {weight.shape}")
        self.dim %= len(weight.shape)
        self.original = weight
        self.u, self.v = (Singular(weight, self.dim, eps=self.eps, side=side) for side in (0, 1))
        self.running = Running([self.u, self.v], 1.0)

    def _weight(self) -> Tensor:
        matrix = as_matrix(self.original, self.dim)
        u: Any = self.u
        v: Any = self.v
        if self.training:
            u, v = iterated(matrix.array, v.array, self.iterations, self.eps, self.original.xp)
            self.running.record(u, v)
        return self.original / ops.sum(ops.matmul(matrix, v) * u)


class Singular(Buffer):
    """The first left (side 0) or right (1) singular vector of a weight's initial values, nearly."""

    __slots__ = ("dim", "eps", "of", "side")

    def __init__(self, of: Parameter, dim: int, *, eps: float, side: int):
        shape = of.global_shape
        super().__init__((prod(shape) // max(shape[dim], 1) if side else shape[dim],), init.zeros)
        self.of, self.dim, self.eps, self.side = of, dim, eps, side

    def fill(self, seed: int, out: Array, start: int, xp: Any) -> None:
        matrix = as_matrix(_initial(self.of, seed, xp), self.dim)
        first = random.normal(stream_key(seed, self.of.key, "singular"), 0, matrix.shape[1], xp)
        vectors = iterated(matrix, first, START_ITERATIONS, self.eps, xp)
        out[...] = vectors[self.side][start:start + len(out)]

    def like(self, another: Another) -> Described:
        of: Any = another(self.of)
        return Singular(of, self.dim, eps=self.eps, side=self.side)


def as_matrix(weight: Any, dim: int) -> Any:
    """(R, C), R the length of `dim`, of a weight."""
    order = (dim, *(d for d in range(len(weight.shape)) if d != dim))
    rows = weight.shape[dim]
    if isinstance(weight, Tensor):
        return ops.reshape(ops.transpose(weight, order), rows, prod(weight.shape) // max(rows, 1))
    return weight.transpose(order).reshape(rows, -1)


def iterated(matrix: Array, v: Array, times: int, eps: float, xp: Any) -> tuple[Array, Array]:
    """Both singular vectors after so many iterations of the power method, from v."""
    for _ in range(times):
        u = matrix @ v
        u = u / max(float(xp.sqrt((u * u).sum())), eps)
        v = u @ matrix
        v = v / max(float(xp.sqrt((v * v).sum())), eps)
    return u, v


def _initial(parameter: Parameter, seed: int, xp: Any) -> Array:
    """float64: the values that the whole of a parameter starts with."""
    values = parameter.init(stream_key(seed, parameter.key), 0, prod(parameter.global_shape), parameter.global_shape, xp)
    return values.reshape(parameter.global_shape)
