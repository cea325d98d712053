"""Norms of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels.sums import sum_over
from mpitrain.ops.choice import clip
from mpitrain.ops.elementwise import absolute
from mpitrain.ops.inputs import Dims, as_tensor, check_number, dims_of
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import min as smallest
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import reshape

__all__ = ["norm", "normalize", "vector_norm"]


def vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    """(sum of |x| ** ord) ** (1 / ord) over `dim`, by default all; inf and -inf are the largest and smallest |x|, 0 counts what
    is not 0. The gradient at a norm of 0 is 0."""
    x = as_tensor(x)
    check_number("vector_norm", "ord", ord)
    dims = dims_of("vector_norm", x, dim)
    if x.dtype.kind != "c" and not is_float(x.dtype):
        raise ShapeError(f"vector_norm: the input is {x.dtype}, expected floating-point or complex numbers")
    if ord in (float("inf"), float("-inf")):
        return (largest if ord > 0 else smallest)(absolute(x), dims, keepdim) if x.ndim else absolute(x)
    sizes = x if ord == 2 and is_float(x.dtype) else absolute(x)      # with the curvature that squares have at 0
    if ord == 0:
        return Tensor((sizes.array != 0).sum(axis=dims, keepdims=keepdim, dtype=sizes.dtype))
    return total(sizes, dims, keepdim) if ord == 1 else Norm.apply(sizes, ord=float(ord), dims=dims, keepdim=keepdim)


class Norm(Function):
    """(sum x ** ord) ** (1 / ord) of x >= 0; 0 has the slope 0, and so has what a norm of 0 is made of."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, ord: float, dims: tuple[int, ...], keepdim: bool) -> Array:
        xp = ctx.xp
        ctx.kept = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
        ctx.ord = ord
        with np.errstate(divide="ignore" if ord < 0 else "warn"):     # the norm of what has a 0 is then 0
            powers = x * x if ord == 2 else x ** ord
            summed = sum_over(powers, dims or None, keepdim)
            result = xp.asarray(xp.sqrt(summed) if ord == 2 else summed ** (1 / ord))
        ctx.save(x, result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, norm = ctx.input(0), reshape(ctx.output(0), ctx.kept)
        one = norm.dtype.type(1)
        share = reshape(grad, ctx.kept) * (Tensor((norm.array != 0) * one))
        norm = norm + Tensor((norm.array == 0) * one)
        if ctx.ord == 2:
            return x * (share / norm)
        base = x + Tensor((x.array == 0) * one)
        return base ** (ctx.ord - 1) * Tensor((x.array != 0) * one) * (share * norm ** (1 - ctx.ord))


def norm(x: Any, p: float | str = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """`vector_norm` with PyTorch's older names; "fro" is p = 2, also of all of x."""
    if isinstance(p, str) and p != "fro":
        raise ShapeError(f'norm: p is "{p}", expected a number or "fro"; matrix_norm has others of matrices')
    p = 2.0 if isinstance(p, str) else p
    check_number("norm", "p", p)
    return vector_norm(x, p, dim, keepdim)


def normalize(x: Any, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Tensor:
    """`x` over its norm along `dim`, which counts as `eps` where it is smaller: rows of length 1."""
    x = as_tensor(x)
    return x / clip(norm(x, p, dim, True), eps)
