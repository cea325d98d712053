"""Systems of equations, inverses and Cholesky factors of matrices (..., n, n), with gradients.

LAPACK computes, through NumPy; a singular matrix where none may be is a ShapeError. Derivatives are those of Giles (2008),
"Collected matrix derivative results", written with operations, so that they have derivatives themselves.
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.diagonals import tril, triu
from mpitrain.ops.inputs import as_tensor
from mpitrain.ops.linalg import matmul
from mpitrain.ops.products import _square
from mpitrain.ops.shape import expand_dims, reshape, squeeze, swapaxes

__all__ = ["cholesky", "cholesky_inverse", "cholesky_solve", "inv", "matrix_exp", "matrix_power", "solve",
            "solve_triangular", "tensorinv", "tensorsolve"]


def _floats(name: str, *arrays: Any) -> list[Tensor]:
    found = [as_tensor(x) for x in arrays]
    for x in found:
        if x.dtype.char not in "fdFD":
            raise ShapeError(f"{name}: an input is {x.dtype}, expected float32, float64, complex64 or complex128")
    return found


def solve(a: Any, b: Any, *, left: bool = True) -> Tensor:
    """x with a x = b (x a = b without `left`), for a (..., n, n) and b (..., n, k), or vectors b (..., n)."""
    a, b = _floats("solve", a, b)
    _square("solve", a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if b.ndim == 0 or (b.shape[-1] if vector or not left else b.shape[-2]) != a.shape[-1] or (vector and not left):
        raise ShapeError(f"solve: matrices {a.shape} and right sides {b.shape} do not fit")
    if vector:
        return squeeze(Solve.apply(a, expand_dims(b, -1)), -1)
    return Solve.apply(a, b) if left else _turned(Solve.apply(_turned(a), _turned(b)))


def _turned(x: Tensor) -> Tensor:
    return swapaxes(x, -1, -2)


class Solve(Function):
    """The solution x of a x = b."""

    broadcasts = True
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array, b: Array) -> Array:
        x = ctx.xp.linalg.solve(a, b)
        ctx.save(a, x)
        return x

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_b = Solve.apply(_turned(ctx.input(0)), grad)
        return -matmul(by_b, _turned(ctx.output(0))) if ctx.needs[0] else None, by_b


def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """x with a x = b (x a = b without `left`); of a one triangle is looked at, with ones on its diagonal if
    `unitriangular`."""
    a, b = _floats("solve_triangular", a, b)
    _square("solve_triangular", a)
    part = (triu if upper else tril)(a, (1 if upper else -1) if unitriangular else 0)
    if unitriangular:
        part = part + Tensor(a.xp.eye(a.shape[-1], dtype=a.dtype))
    if b.ndim < 2 or b.shape[-2 if left else -1] != a.shape[-1]:
        raise ShapeError(f"solve_triangular: matrices {a.shape} and right sides {b.shape} do not fit")
    return Solve.apply(part, b) if left else _turned(Solve.apply(_turned(part), _turned(b)))


def inv(a: Any) -> Tensor:
    """The inverse."""
    return Inverse.apply(_square("inv", *_floats("inv", a)))


def matrix_power(x: Any, n: int) -> Tensor:
    """x times itself, n times; n = 0 gives the identity, n < 0 powers of the inverse."""
    x = _square("matrix_power", x)
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 0:
        return x * 0 + Tensor(x.xp.eye(x.shape[-1], dtype=x.dtype))
    half = matrix_power(x, n // 2) if n > 1 else x
    return x if n == 1 else matmul(matmul(half, half), x) if n % 2 else matmul(half, half)


TERMS = 18                                        # of the series at a norm of 1: the next one is below float64's last digit


def matrix_exp(x: Any) -> Tensor:
    """1 + x + x x / 2 + ... of matrices (..., n, n): the series of x / 2^k, whose norm is at most 1, squared k times."""
    x = _square("matrix_exp", _floats("matrix_exp", x)[0])
    norm = float(abs(x.array).sum(-2).max()) if x.size else 0.0
    halvings = max(0, math.ceil(math.log2(norm))) if 1 < norm < math.inf else 0
    part = x * 2.0 ** -halvings
    one = Tensor(x.xp.eye(x.shape[-1], dtype=x.dtype))
    made = one + part * (1 / TERMS)
    for k in range(TERMS - 1, 0, -1):
        made = one + matmul(part, made) * (1 / k)
    for _ in range(halvings):
        made = matmul(made, made)
    return made


class Inverse(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        result = ctx.xp.linalg.inv(a)
        ctx.save(result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        turned = _turned(ctx.output(0))
        return -matmul(matmul(turned, grad), turned)


def cholesky(a: Any, *, upper: bool = False) -> Tensor:
    """The lower triangular l with l l' = a (or `upper`: its transpose), for symmetric positive-definite a, of which the lower
    triangle is looked at. ShapeError where a is not positive-definite."""
    lower = Cholesky.apply(_square("cholesky", *_floats("cholesky", a)))
    return _turned(lower) if upper else lower


class Cholesky(Function):
    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        result = ctx.xp.linalg.cholesky(a)
        ctx.save(result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        """l^-T phi(l' g) l^-1, made symmetric; phi takes the lower triangle and half of the diagonal."""
        lower = ctx.output(0)
        inner = matmul(_turned(lower), tril(grad))
        half = Tensor(0.5 * lower.xp.eye(lower.shape[-1], dtype=lower.dtype))
        phi = tril(inner, -1) + inner * half
        back = inv(lower)
        full = matmul(matmul(_turned(back), phi), back)
        return (full + _turned(full)) * 0.5


def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Tensor:
    """x with a x = b, from the Cholesky factor of a."""
    lower = _turned(as_tensor(factor)) if upper else as_tensor(factor)
    return solve_triangular(_turned(lower), solve_triangular(lower, b, upper=False), upper=True)


def cholesky_inverse(factor: Any, upper: bool = False) -> Tensor:
    """The inverse of a, from its Cholesky factor."""
    factor = _square("cholesky_inverse", factor)
    return cholesky_solve(Tensor(factor.xp.eye(factor.shape[-1], dtype=factor.dtype)), factor, upper)


def tensorinv(a: Any, ind: int = 2) -> Tensor:
    """The inverse of `tensordot(a, ., ind)`: the first `ind` dims of a have the same size together as the others."""
    a = as_tensor(a)
    if not 0 < ind < a.ndim:
        raise ShapeError(f"tensorinv: ind {ind} of shape {a.shape}, expected 1 ... {a.ndim - 1}")
    rows = 1
    for n in a.shape[:ind]:
        rows *= n
    return reshape(inv(reshape(a, (rows, a.size // max(rows, 1)))), (*a.shape[ind:], *a.shape[:ind]))


def tensorsolve(a: Any, b: Any, dims: Any = None) -> Tensor:
    """x with tensordot(a, x, x.ndim) = b; the dims `dims` of a are moved to its end first."""
    a, b = _floats("tensorsolve", a, b)
    if dims is not None:
        from mpitrain.ops.shape import transpose
        moved = [d % a.ndim for d in dims]
        a = transpose(a, (*[d for d in range(a.ndim) if d not in moved], *moved))
    shape = a.shape[b.ndim:]
    return reshape(solve(reshape(a, (b.size, b.size)), reshape(b, (b.size,))), shape)
