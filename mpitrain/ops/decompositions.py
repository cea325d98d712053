"""Decompositions of matrices (..., m, n), with gradients, and what is read off singular values: pseudo-inverse, norm, rank.

LAPACK computes, through NumPy. Derivatives are those of Giles (2008), written with operations.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.diagonals import triu
from mpitrain.ops.elementwise import absolute
from mpitrain.ops.inputs import as_tensor
from mpitrain.ops.linalg import matmul
from mpitrain.ops.matrices import Solve, _floats, _turned, inv
from mpitrain.ops.norms import vector_norm
from mpitrain.ops.products import _square
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import min as smallest
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.results import Orthogonal, Singular, Spectrum
from mpitrain.ops.shape import expand_dims, reshape

__all__ = ["cond", "eigh", "eigvalsh", "matrix_norm", "matrix_rank", "pinv", "qr", "svd", "svdvals"]


def pinv(a: Any, *, atol: Any = None, rtol: Any = None) -> Tensor:
    """The pseudo-inverse; singular values up to `atol`, or `rtol` times the largest (default: max(m, n) eps, or 0 with an
    `atol`), count as 0."""
    a, = _floats("pinv", a)
    if a.ndim < 2:
        raise ShapeError(f"pinv: shape {a.shape}, expected matrices (..., m, n)")
    return PseudoInverse.apply(a, atol=atol, rtol=rtol)


def _least(xp: Any, s: Array, shape: tuple[int, ...], atol: Any, rtol: Any) -> Array:
    """What singular values s, of matrices of this shape, must be above."""
    if rtol is None:
        rtol = max(shape[-2:]) * float(xp.finfo(s.dtype).eps) if atol is None else 0.0
    given = (0.0 if atol is None else atol, rtol)
    absolute, relative = (t if isinstance(t, float | int) else as_tensor(t).array[..., None] for t in given)
    return xp.maximum(absolute, relative * (s.max(axis=-1, keepdims=True) if s.shape[-1] else 0))


class PseudoInverse(Function):
    """Its derivative is Golub and Pereyra's (1973), for matrices whose rank does not change."""

    @staticmethod
    def forward(ctx: Context, a: Array, *, atol: Any, rtol: Any) -> Array:
        u, s, v = ctx.xp.linalg.svd(a, full_matrices=False)
        counts = s > _least(ctx.xp, s, a.shape, atol, rtol)
        inverse = (counts / ctx.xp.where(counts, s, 1)).astype(a.dtype)
        result = ctx.xp.matmul(v.swapaxes(-1, -2) * inverse[..., None, :], u.swapaxes(-1, -2))
        ctx.save(a, result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        a, p = ctx.input(0), ctx.output(0)
        turned, back = _turned(p), _turned(grad)
        left = matmul(matmul(back - matmul(matmul(a, p), back), p), turned) if a.size else a * 0
        right = matmul(matmul(turned, p), back - matmul(matmul(back, p), a)) if a.size else a * 0
        return left + right - matmul(matmul(turned, grad), turned)


def qr(a: Any, mode: str = "reduced") -> Orthogonal:
    """Orthogonal columns q and upper triangular r with q r = a (..., m, n). The gradient wants the mode "reduced", and m >= n."""
    a, = _floats("qr", a)
    if a.ndim < 2 or mode not in ("reduced", "complete"):
        raise ShapeError(f'qr: shape {a.shape} with mode "{mode}", expected matrices, and "reduced" or "complete"')
    return Orthogonal(*QR.apply(a, mode=mode))


class QR(Function):
    @staticmethod
    def forward(ctx: Context, a: Array, *, mode: str) -> tuple[Array, Array]:
        q, r = ctx.xp.linalg.qr(a, mode)
        ctx.save(q, r)
        ctx.square = r.shape[-2] == r.shape[-1]
        return q, r

    @staticmethod
    def derivative(ctx: Context, by_q: Tensor, by_r: Tensor) -> Tensor:
        if not ctx.square:
            raise ShapeError('qr: the gradient wants the mode "reduced" and matrices with as many rows as columns or more')
        q, r = ctx.output(0), ctx.output(1)
        m = matmul(by_r, _turned(r)) - matmul(_turned(q), by_q)
        both = triu(m) + _turned(triu(m, 1))
        return _turned(Solve.apply(r, _turned(by_q + matmul(q, both))))


def eigh(a: Any, UPLO: str = "L") -> Spectrum:       # noqa: N803  (PyTorch's name)
    """Eigenvalues, rising, and eigenvectors, in columns, of symmetric matrices; the gradient of vectors wants distinct values."""
    return Spectrum(*Eigen.apply(_square("eigh", *_floats("eigh", a)), side=UPLO))


def eigvalsh(a: Any, UPLO: str = "L") -> Tensor:                  # noqa: N803
    """The eigenvalues of symmetric matrices, rising."""
    return eigh(a, UPLO)[0]


class Eigen(Function):
    @staticmethod
    def forward(ctx: Context, a: Array, *, side: str) -> tuple[Array, Array]:
        values, vectors = ctx.xp.linalg.eigh(a, side)
        ctx.save(values, vectors)
        return values, vectors

    @staticmethod
    def derivative(ctx: Context, by_values: Tensor, by_vectors: Tensor) -> Tensor:
        values, v = ctx.output(0), ctx.output(1)
        xp, n = v.xp, v.shape[-1]
        eye = xp.eye(n, dtype=v.dtype)
        inner = Tensor(eye) * expand_dims(by_values, -1)
        if by_vectors.requires_grad or by_vectors.array.any():
            gaps = expand_dims(values, -2) - expand_dims(values, -1)
            inner = inner + matmul(_turned(v), by_vectors) * Tensor(1 - eye) / (gaps + Tensor(eye))
        return matmul(matmul(v, inner), _turned(v))


def svdvals(a: Any) -> Tensor:
    """The singular values, falling; they have a first derivative."""
    a, = _floats("svdvals", a)
    if a.ndim < 2:
        raise ShapeError(f"svdvals: shape {a.shape}, expected matrices (..., m, n)")
    return SingularValues.apply(a)


class SingularValues(Function):
    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        u, s, v = ctx.xp.linalg.svd(a, full_matrices=False)
        ctx.save(u, v)
        return s

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        u, v = ctx.saved
        return ctx.xp.matmul(u * grad[..., None, :], v)


def svd(a: Any, full_matrices: bool = True) -> Singular:
    """u, s and v' with u diag(s) v' = a; without gradients (`svdvals` has them)."""
    a, = _floats("svd", a)
    if a.ndim < 2:
        raise ShapeError(f"svd: shape {a.shape}, expected matrices (..., m, n)")
    u, s, v = a.xp.linalg.svd(a.array, full_matrices=full_matrices)
    return Singular(Tensor(u), Tensor(s), Tensor(v))


def matrix_norm(a: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False) -> Tensor:
    """The Frobenius norm; "nuc", the sum of the singular values; 2 and -2, the largest and smallest of them; 1 and -1, inf and
    -inf, the largest and smallest sum of a column's or a row's sizes."""
    a, = _floats("matrix_norm", a)
    from mpitrain.ops.inputs import dims_of
    rows, columns = dims = dims_of("matrix_norm", a, tuple(dim))
    if a.ndim < 2 or len(dims) != 2 or ord not in ("fro", "nuc", 1, -1, 2, -2, float("inf"), float("-inf")):
        raise ShapeError(f'matrix_norm: shape {a.shape}, dim {dim}, ord {ord!r}; expected two dims, and "fro", "nuc", 1, -1, 2, '
                         "-2, inf or -inf")
    if ord == "fro":
        return vector_norm(a, 2, dims, keepdim)
    if ord in ("nuc", 2, -2):
        from mpitrain.ops.shape import transpose
        order = (*[d for d in range(a.ndim) if d not in dims], rows, columns)
        s = svdvals(transpose(a, order))
        made = total(s, -1) if ord == "nuc" else (largest if ord == 2 else smallest)(s, -1)
    else:
        along, over = (rows, columns) if ord in (1, -1) else (columns, rows)
        sums = total(absolute(a), along, True)
        made = (largest if ord > 0 else smallest)(sums, over, True)
        made = reshape(made, [n for d, n in enumerate(a.shape) if d not in dims])
    return reshape(made, [1 if d in dims else n for d, n in enumerate(a.shape)]) if keepdim else made


def cond(a: Any, p: Any = None) -> Tensor:
    """The condition number: the largest singular value over the smallest, or the product of the `p`-norms of a and its
    inverse."""
    if p in (None, 2, -2):
        s = svdvals(a)
        return s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    return matrix_norm(a, p) * matrix_norm(inv(a), p)


def matrix_rank(a: Any, *, atol: Any = None, rtol: Any = None) -> Tensor:
    """How many singular values are above `atol` and `rtol` times the largest, which are as `pinv` takes them; int64."""
    s = svdvals(a)
    return Tensor(s.xp.asarray((s.array > _least(s.xp, s.array, as_tensor(a).shape, atol, rtol)).sum(axis=-1)))
