"""Determinants of matrices (..., n, n) and their logarithms, with gradients: LAPACK's, through NumPy.

Derivatives of `det` are made of cofactors, with no inverse, so that singular matrices have them.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.diagonals import diagonal
from mpitrain.ops.linalg import matmul
from mpitrain.ops.matrices import _floats, _turned, inv
from mpitrain.ops.products import _square
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.results import SignAndLog
from mpitrain.ops.shape import expand_dims

__all__ = ["det", "logdet", "slogdet"]


def det(a: Any) -> Tensor:
    """The determinant. Its first two derivatives are those of singular matrices too, higher ones of invertible ones alone."""
    return Determinant.apply(_square("det", *_floats("det", a)))


class Determinant(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        ctx.save(a)
        return ctx.xp.asarray(ctx.xp.linalg.det(a))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return _each(grad) * Cofactors.apply(ctx.input(0))


class Cofactors(Function):
    """The slopes of the determinant. With a = U S V': det(U) det(V') U diag(the products of the others' singular values) V'."""

    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        ctx.save(a)
        if not a.size:
            return a.copy()
        xp = ctx.xp
        u, s, v = xp.linalg.svd(a)
        others = _others(xp, s).prod(axis=-1)
        return _sign(xp, u, v) * xp.matmul(u.conj() * others[..., None, :], v.conj())

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return CofactorSlopes.apply(ctx.input(0), grad)


class CofactorSlopes(Function):
    """The second derivative of the determinant in the direction g. With a = U S V' and m = U' g V it is that of S:
    diag(p diag(m)) - p m^T, where p has the products of the singular values but two."""

    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array, g: Array) -> Array:
        ctx.save(a, g)
        if not a.size:
            return a.copy()
        xp, eye = ctx.xp, ctx.xp.eye(a.shape[-1], dtype=a.dtype)
        u, s, v = xp.linalg.svd(a)
        m = xp.matmul(xp.matmul(u.conj().swapaxes(-1, -2), g), v.conj().swapaxes(-1, -2))
        others = _others(xp, s)
        below = xp.cumprod(others, axis=-1)[..., :-1]
        above = xp.cumprod(others[..., ::-1], axis=-1)[..., -2::-1]
        one = xp.ones_like(others[..., :1])
        p = xp.concatenate([one, below], axis=-1) * xp.concatenate([above, one], axis=-1) * (1 - eye.real)
        along = xp.matmul(p, xp.diagonal(m, axis1=-2, axis2=-1)[..., None].copy())
        return _sign(xp, u, v) * xp.matmul(xp.matmul(u.conj(), eye * along - p * m.swapaxes(-1, -2)), v.conj())

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        a, g = ctx.input(0), ctx.input(1)
        return _third(a, g, grad) if ctx.needs[0] else None, CofactorSlopes.apply(a, grad) if ctx.needs[1] else None


def _third(a: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """The third derivative of det(a) in the directions g and h, by the inverse."""
    try:
        x = inv(a)
    except ShapeError:
        raise ShapeError("det: a matrix is singular, and derivatives above the second want invertible ones; add a small multiple "
                         "of the identity") from None
    xg, xh = matmul(x, g), matmul(x, h)
    both = matmul(xg, xh)
    of_g, of_h, of_both = (total(diagonal(m, 0, -2, -1), -1) for m in (xg, xh, both))
    made = _each(of_g * of_h - of_both) * x - _each(of_g) * matmul(xh, x) - _each(of_h) * matmul(xg, x)
    return _each(det(a)) * _turned(made + matmul(both + matmul(xh, xg), x))


def _each(x: Tensor) -> Tensor:
    """A number for each matrix."""
    return expand_dims(expand_dims(x, -1), -1)


def _others(xp: Any, s: Array) -> Array:
    """(..., n, n) of s (..., n): row i has a one in place of number i."""
    return xp.where(xp.eye(s.shape[-1], dtype=bool), xp.ones((), s.dtype), s[..., None, :])


def _sign(xp: Any, u: Array, v: Array) -> Array:
    return xp.asarray(xp.linalg.det(u) * xp.linalg.det(v))[..., None, None]


def slogdet(a: Any) -> SignAndLog:
    """The sign of the determinant, and the logarithm of its size; of real matrices."""
    found = SignLog.apply(_square("slogdet", *_floats("slogdet", a)))
    return SignAndLog(Tensor(found[0].array), found[1])


def logdet(a: Any) -> Tensor:
    """The logarithm of the determinant: NaN where that is negative."""
    sign, size = slogdet(a)
    return size + Tensor(sign.xp.where(sign.array < 0, sign.xp.nan, 0).astype(sign.dtype))


class SignLog(Function):
    @staticmethod
    def forward(ctx: Context, a: Array) -> tuple[Array, Array]:
        ctx.save(a)
        sign, size = ctx.xp.linalg.slogdet(a)
        return ctx.xp.asarray(sign), ctx.xp.asarray(size)

    @staticmethod
    def derivative(ctx: Context, _: Tensor, grad: Tensor) -> Tensor:
        return _each(grad) * _turned(inv(ctx.input(0)))
