"""Distances and angles between the rows of two matrices, or between all of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.choice import maximum
from mpitrain.ops.elementwise import absolute, power, sqrt, subtract
from mpitrain.ops.inputs import as_tensor, check_number, float_tensor
from mpitrain.ops.norms import vector_norm
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import min as smallest
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import broadcast_to, expand_dims, swapaxes

__all__ = ["cdist", "cosine_similarity", "pairwise_distance"]

LEAST_WORK, PART = 1 << 14, 1 << 16               # numbers from where products are faster; numbers of differences at a time


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """(..., I, J): the p-norms of the differences of the rows of x1 (..., I, D) and x2 (..., J, D), to the last digits.

    `compute_mode` is PyTorch's choice between differences and a product of matrices. Here p = 2 of float32 takes a product in
    float64, and differences where that has too few digits: the results are those of differences.
    """
    x1, x2 = as_tensor(x1), as_tensor(x2)
    check_number("cdist", "p", p)
    if x1.ndim < 2 or x2.ndim < 2 or x1.shape[-1] != x2.shape[-1] or p < 0:
        raise ShapeError(f"cdist: shapes {x1.shape} and {x2.shape} with p={p}; expected rows of one width, and p of at least 0")
    if p == 2 and x1.dtype == x2.dtype == "float32" and x1.shape[:-2] == x2.shape[:-2] and x1.size * x2.shape[-2] >= LEAST_WORK:
        return Distances.apply(x1, x2)
    return vector_norm(_differences(x1, x2), p, -1)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """x1 x2 / (|x1| |x2|) along `dim`, neither length below eps; their shapes broadcast."""
    x1, x2 = float_tensor("cosine_similarity", x1), float_tensor("cosine_similarity", x2)
    try:
        shape = np.broadcast_shapes(x1.shape, x2.shape)
    except ValueError:
        raise ShapeError(f"cosine_similarity: shapes {x1.shape} and {x2.shape} do not broadcast") from None

    def unit(x: Tensor) -> Tensor:
        x = x if x.shape == shape else broadcast_to(x, shape)
        return x / sqrt(maximum(total(x * x, dim, True), eps ** 2))
    return total(unit(x1) * unit(x2), dim)


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The p-norm of x1 - x2 + eps over the last dim; p is any number but 0, inf and -inf too."""
    check_number("pairwise_distance", "p", p)
    if p == 0 or math.isnan(p):
        raise ShapeError(f"pairwise_distance: p is {p}, expected another number")
    gap = absolute(float_tensor("pairwise_distance", x1) - float_tensor("pairwise_distance", x2) + eps)
    if math.isinf(p):
        return (largest if p > 0 else smallest)(gap, -1, keepdim)
    if p == 1:
        return total(gap, -1, keepdim)
    return sqrt(total(gap * gap, -1, keepdim)) if p == 2 else power(total(power(gap, p), -1, keepdim), 1 / p)


def _differences(x: Tensor, y: Tensor) -> Tensor:
    return subtract(expand_dims(x, -2), swapaxes(expand_dims(y, -2), -2, -3))


class Distances(Function):
    """sqrt(|x|^2 + |y|^2 - 2 x y) in float64, and from differences where that is small beside its terms, or not finite."""

    @staticmethod
    def forward(ctx: Context, x: Array, y: Array) -> Array:
        xp = ctx.xp
        a, b = x.astype("float64"), y.astype("float64")
        result = xp.empty((*x.shape[:-1], y.shape[-2]), x.dtype)
        found = []
        with np.errstate(invalid="ignore"):       # infinities
            left, right = (a * a).sum(-1)[..., None], (b * b).sum(-1)[..., None]
            terms = xp.concatenate([b, xp.ones_like(right), right], -1).swapaxes(-1, -2)
            factors = xp.concatenate([-2 * a, left, xp.ones_like(left)], -1)      # The product makes the whole sum at once.
            slack = (x.shape[-1] + 4) * 2.0 ** -26
            rows = max(1, PART * x.shape[-2] // max(1, result.size))
            for first in range(0, x.shape[-2], rows):          # in the cache
                part = (..., slice(first, first + rows), slice(None))
                squares = xp.matmul(factors[part], terms)
                least = squares.min(-1, keepdims=True)
                if not (least > slack * (left[part] + right.max(-2, keepdims=True))).all():
                    close = xp.nonzero(~(squares > slack * (left[part] + right.swapaxes(-1, -2))))
                    squares[close] = 0
                    found.append((*close[:-2], close[-2] + first, close[-1]))
                result[part] = xp.sqrt(squares, out=squares)
            close = tuple(xp.concatenate(places) for places in zip(*found)) if found else xp.nonzero(xp.zeros(result.shape, bool))
            for first in range(0, len(close[0]), step := max(1, PART // max(1, x.shape[-1]))):
                some = tuple(places[first:first + step] for places in close)
                gap = a[some[:-1]] - b[(*some[:-2], some[-1])]
                result[some] = xp.sqrt((gap * gap).sum(-1))
        ctx.save(x, y, result)
        ctx.close = close
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array, Array]:
        x, y, result = ctx.saved
        xp = ctx.xp
        a, b = x.astype("float64"), y.astype("float64")
        with np.errstate(invalid="ignore"):
            share = grad / xp.where(result == 0, np.float64(np.inf), result)
            apart = share[ctx.close]
            share[ctx.close] = 0
            dx = a * share.sum(-1)[..., None] - xp.matmul(share, b)
            dy = b * share.sum(-2)[..., None] - xp.matmul(share.swapaxes(-1, -2), a)
            for first in range(0, len(apart), step := max(1, PART // max(1, x.shape[-1]))):
                some = tuple(places[first:first + step] for places in ctx.close)
                rows, columns = some[:-1], (*some[:-2], some[-1])
                part = apart[first:first + step, None] * (a[rows] - b[columns])
                xp.add.at(dx, rows, part)
                xp.subtract.at(dy, columns, part)
        return dx.astype(x.dtype), dy.astype(y.dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, result = ctx.input(0), ctx.input(1), ctx.output(0)
        some = Tensor((result.array != 0).astype(result.dtype))
        share = grad * some / (result + (1 - some))
        moved = expand_dims(share, -1) * _differences(x, y)
        return total(moved, -2), -total(moved, -3)
