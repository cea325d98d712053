"""Products of vectors and matrices by PyTorch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.ops.complex_numbers import conj
from mpitrain.ops.contraction import tensordot
from mpitrain.ops.elementwise import multiply
from mpitrain.ops.index import take
from mpitrain.ops.inputs import as_tensor, dim_of
from mpitrain.ops.linalg import matmul
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import broadcast_to, expand_dims, reshape

__all__ = ["addbmm", "addmm", "addmv", "addr", "baddbmm", "cross", "dot", "inner", "kron",
           "multi_dot", "outer", "vander", "vdot", "vecdot"]


def _of_dims(name: str, *tensors: tuple[Any, int]) -> list[Tensor]:
    found = [as_tensor(x) for x, _ in tensors]
    if any(x.ndim != n for x, (_, n) in zip(found, tensors)):
        raise ShapeError(f"{name}: shapes {', '.join(str(x.shape) for x in found)}, expected "
                         f"{', '.join(str(n) for _, n in tensors)} dims")
    return found


def _product(name: str, x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0] or x.ndim == 3 == y.ndim and x.shape[0] != y.shape[0]:
        raise ShapeError(f"{name}: shapes {x.shape} and {y.shape} do not fit")
    return matmul(x, y)


def mm(x: Any, y: Any) -> Tensor:
    """The product of two matrices."""
    return _product("mm", *_of_dims("mm", (x, 2), (y, 2)))


def bmm(x: Any, y: Any) -> Tensor:
    """The products of as many matrices, (B, I, J) and (B, J, K)."""
    return _product("bmm", *_of_dims("bmm", (x, 3), (y, 3)))


def mv(x: Any, y: Any) -> Tensor:
    """The product of a matrix and a vector."""
    return _product("mv", *_of_dims("mv", (x, 2), (y, 1)))


def dot(x: Any, y: Any) -> Tensor:
    """The inner product of two vectors, without conjugation."""
    return _product("dot", *_of_dims("dot", (x, 1), (y, 1)))


def vdot(x: Any, y: Any) -> Tensor:
    """The inner product of two vectors, of which the first is conjugated."""
    return dot(conj(x), y)


def vecdot(x: Any, y: Any, dim: int = -1) -> Tensor:
    """The sum of conj(x) y along `dim`; the other dims broadcast."""
    return total(conj(x) * y, dim)


def inner(x: Any, y: Any) -> Tensor:
    """The sum over the last dim of both; a number multiplies."""
    x, y = as_tensor(x), as_tensor(y)
    return multiply(x, y) if not x.ndim or not y.ndim else tensordot(x, y, ([-1], [-1]))


def outer(x: Any, y: Any) -> Tensor:
    """(I, J) of vectors (I,) and (J,)."""
    x, y = _of_dims("outer", (x, 1), (y, 1))
    return multiply(expand_dims(x, 1), y)


def _sum(name: str, x: Any, made: Tensor, beta: float, alpha: float) -> Tensor:
    """beta x + alpha made; a beta of 0 ignores x, NaN too."""
    made = made if alpha == 1 else made * alpha
    x = broadcast_to(x, made.shape)
    return made + 0 * x.array.dtype.type(0) if beta == 0 else made + (x if beta == 1 else x * beta)


def addmm(x: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha mat1 mat2, of matrices mat1 and mat2; x broadcasts."""
    return _sum("addmm", x, mm(mat1, mat2), beta, alpha)


def addmv(x: Any, mat: Any, vec: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha mat vec, of a matrix and a vector; x broadcasts."""
    return _sum("addmv", x, mv(mat, vec), beta, alpha)


def addr(x: Any, vec1: Any, vec2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha vec1 vec2', of vectors vec1 and vec2; x broadcasts."""
    return _sum("addr", x, outer(vec1, vec2), beta, alpha)


def baddbmm(x: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha batch1 batch2, of as many matrices, (B, I, J) and (B, J, K); x broadcasts."""
    return _sum("baddbmm", x, bmm(batch1, batch2), beta, alpha)


def addbmm(x: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha times the sum of the products of as many matrices, (B, I, J) and (B, J, K); x broadcasts."""
    return _sum("addbmm", x, total(bmm(batch1, batch2), 0), beta, alpha)


def kron(x: Any, y: Any) -> Tensor:
    """The Kronecker product: each number of x times y; the one with fewer dims gets leading ones."""
    x, y = as_tensor(x), as_tensor(y)
    dims = max(x.ndim, y.ndim)
    a, b = ((1,) * (dims - t.ndim) + t.shape for t in (x, y))
    made = multiply(reshape(x, [n for size in a for n in (size, 1)]), reshape(y, [n for size in b for n in (1, size)]))
    return reshape(made, [n * m for n, m in zip(a, b)])


def cross(x: Any, y: Any, dim: int = -1) -> Tensor:
    """The vector product along a dim of size 3; the other dims broadcast."""
    x, y = as_tensor(x), as_tensor(y)
    if x.ndim != y.ndim:
        raise ShapeError(f"cross: shapes {x.shape} and {y.shape}, expected as many dims")
    d = dim_of("cross", x, dim)
    if x.shape[d:d + 1] != (3,) or y.shape[d:d + 1] != (3,):
        raise ShapeError(f"cross: dim {dim} of shapes {x.shape} and {y.shape}, expected 3 in both")
    first, second = x.xp.asarray([1, 2, 0]), x.xp.asarray([2, 0, 1])
    return take(x, first, d) * take(y, second, d) - take(x, second, d) * take(y, first, d)


def _square(name: str, x: Any) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{name}: shape {x.shape}, expected square matrices (..., n, n)")
    return x


def multi_dot(tensors: Sequence[Any]) -> Tensor:
    """The product of two matrices or more, in the order that costs least; the first and the last may be vectors."""
    found = [as_tensor(x) for x in tensors]
    if len(found) < 2 or any(x.ndim != 2 for x in found[1:-1]) or not all(x.ndim in (1, 2) for x in found):
        raise ShapeError(f"multi_dot: shapes {', '.join(str(x.shape) for x in found)}, expected two matrices or more; the first "
                         "and the last may be vectors")
    from mpitrain.ops.contraction import einsum
    letters = [chr(97 + i) + chr(98 + i) for i in range(len(found))]
    if found[0].ndim == 1:
        letters[0] = letters[0][1]
    if found[-1].ndim == 1:
        letters[-1] = letters[-1][0]
    ends = (letters[0][0] if found[0].ndim == 2 else "") + (letters[-1][1] if found[-1].ndim == 2 else "")
    return einsum(f"{','.join(letters)}->{ends}", *found)


def vander(x: Any, N: int | None = None) -> Tensor:               # noqa: N803  (PyTorch's name)
    """(..., n, N): powers 0 ... N - 1 of x (..., n)."""
    x = as_tensor(x)
    count = (x.shape or (0,))[-1] if N is None else N
    if x.ndim == 0 or count < 1:
        raise ShapeError(f"vander: shape {x.shape} and N {N}, expected one dim or more, and N of at least 1")
    from mpitrain.ops.shape import stack
    powers = [x * 0 + 1]
    while len(powers) < count:
        powers.append(powers[-1] * x)
    return stack(powers, -1)
