"""Systems of equations, inverses, determinants and decompositions of matrices (..., n, n), with gradients.

LAPACK computes, through NumPy; a singular matrix where none may be is a ShapeError. Derivatives are those of Giles (2008),
"Collected matrix derivative results", written with operations, so that they have derivatives themselves.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.diagonals import tril, triu
from mpitrain.ops.elementwise import absolute
from mpitrain.ops.inputs import as_tensor
from mpitrain.ops.linalg import matmul
from mpitrain.ops.products import _square, vector_norm
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import min as smallest
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import expand_dims, reshape, squeeze, swapaxes

__all__ = ["cholesky", "cholesky_inverse", "cholesky_solve", "cond", "det", "eigh", "eigvalsh", "inv", "logdet", "matrix_norm",
           "matrix_power", "matrix_rank", "pinv", "qr", "slogdet", "solve", "solve_triangular", "svd", "svdvals", "tensorinv",
           "tensorsolve"]


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


def det(a: Any) -> Tensor:
    """The determinant. Its gradient is that of singular matrices too, its second one of invertible ones alone."""
    return Determinant.apply(_square("det", *_floats("det", a)))


class Determinant(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, a: Array) -> Array:
        result = ctx.xp.asarray(ctx.xp.linalg.det(a))
        ctx.save(a, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad[..., None, None] * _cofactors(ctx.xp, ctx.saved[0])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return _each(grad * ctx.output(0)) * _turned(inv(ctx.input(0)))


def _each(x: Tensor) -> Tensor:
    """A number for each matrix."""
    return expand_dims(expand_dims(x, -1), -1)


def _cofactors(xp: Any, a: Array) -> Array:
    """With a = U S V': det(U) det(V) U diag(the products of the others' singular values) V', conjugated as backward wants it."""
    u, s, v = xp.linalg.svd(a)
    n = a.shape[-1]
    others = xp.where(xp.eye(n, dtype=bool), xp.ones((), s.dtype), s[..., None, :]).prod(axis=-1)
    sign = xp.asarray(xp.linalg.det(u) * xp.linalg.det(v))
    return sign[..., None, None] * xp.matmul(u.conj() * others[..., None, :], v.conj()) if n else a


def slogdet(a: Any) -> tuple[Tensor, Tensor]:
    """The sign of the determinant, and the logarithm of its size; of real matrices."""
    found = SignLog.apply(_square("slogdet", *_floats("slogdet", a)))
    return Tensor(found[0].array), found[1]


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
    return xp.maximum(absolute, relative * s.max(axis=-1, keepdims=True, initial=0))


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


def qr(a: Any, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Orthogonal columns q and upper triangular r with q r = a (..., m, n). The gradient wants the mode "reduced", and m >= n."""
    a, = _floats("qr", a)
    if a.ndim < 2 or mode not in ("reduced", "complete"):
        raise ShapeError(f'qr: shape {a.shape} with mode "{mode}", expected matrices, and "reduced" or "complete"')
    made: tuple[Tensor, Tensor] = QR.apply(a, mode=mode)
    return made


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


def eigh(a: Any, UPLO: str = "L") -> tuple[Tensor, Tensor]:       # noqa: N803  (PyTorch's name)
    """Eigenvalues, rising, and eigenvectors, in columns, of symmetric matrices; the gradient of vectors wants distinct values."""
    made: tuple[Tensor, Tensor] = Eigen.apply(_square("eigh", *_floats("eigh", a)), side=UPLO)
    return made


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
        if by_vectors.array.any():
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


def svd(a: Any, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """u, s and v' with u diag(s) v' = a; without gradients (`svdvals` has them)."""
    a, = _floats("svd", a)
    if a.ndim < 2:
        raise ShapeError(f"svd: shape {a.shape}, expected matrices (..., m, n)")
    u, s, v = a.xp.linalg.svd(a.array, full_matrices=full_matrices)
    return Tensor(u), Tensor(s), Tensor(v)


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
