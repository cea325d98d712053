"""Sums of products over named indices: einsum, tensordot and their like, by our matrix products in the order that costs least."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.product import product, products
from mpitrain.ops.diagonals import diagonal
from mpitrain.ops.inputs import as_tensor, dim_of
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import reshape, transpose

__all__ = ["einsum", "tensordot"]

LETTERS = ascii_uppercase + ascii_lowercase       # in the order of their codes, which that of a result without "->" follows
Index = tuple[int, ...]                           # an index is a number; those of an ellipsis are negative
Spec = tuple[Index, Index, Index]                 # of the left operand, the right one and the result


def einsum(equation: Any, *operands: Any) -> Tensor:
    """The sum of products that `equation` names, as "bik,bkj->bij"; torch.einsum and numpy.einsum.

    A letter for each dim; letters that are not in the result are summed over, a letter twice in an operand is its diagonal, "..."
    stands for dims that broadcast. Without "->" the result has the letters that occur once, in alphabetic order. Three operands
    and more are contracted in the order of numpy.einsum_path. Operands may also be given as one list, and, without an equation,
    each with a list of numbers 0 ... 51 (and `...`) after it that name its dims; a last list is that of the result. Raises
    ShapeError where the equation does not fit them.
    """
    if not isinstance(equation, str):
        equation, operands = _lettered((equation, *operands))
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    tensors = [as_tensor(x) for x in given]
    parts, result = _parsed(equation.replace(" ", ""), tuple(x.ndim for x in tensors))
    sizes = _sizes(equation, parts, tensors)
    terms = [_prepared(x, part, sizes) for x, part in zip(tensors, parts)]
    for chosen in _path(tuple(index for _, index in terms), result, tuple(sizes.items())):
        taken = [terms.pop(place) for place in sorted(chosen, reverse=True)][::-1]
        while len(taken) > 1:
            others = {i for _, index in (*terms, *taken[2:]) for i in index}
            taken[:2] = [_pair(taken[0], taken[1], others.union(result))]
        terms.append(taken[0])
    x, index = terms[0]
    x, index = _summed(x, index, set(result))
    if missing := [i for i in result if i not in index]:      # of size 1 in each operand that has them
        x, index = reshape(x, (*[sizes[i] for i in missing], *x.shape)), (*missing, *index)
    order = tuple(index.index(i) for i in result)
    return x if order == tuple(range(len(order))) else transpose(x, order)


def tensordot(a: Any, b: Any, dims: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """The sum over `dims`: so many of the last of a and the first of b, or two lists of dims. ShapeError where sizes differ."""
    a, b = as_tensor(a), as_tensor(b)
    if isinstance(dims, int):
        if not 0 <= dims <= min(a.ndim, b.ndim):
            raise ShapeError(f"tensordot: {dims} dims of shapes {a.shape} and {b.shape}")
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    left, right = ([dim_of("tensordot", t, d) for d in ds] for t, ds in zip((a, b), dims))
    if [a.shape[d] for d in left] != [b.shape[d] for d in right]:
        raise ShapeError(f"tensordot: dims {left} of shape {a.shape} and dims {right} of shape {b.shape} differ in size")
    of_x = tuple(range(a.ndim))
    of_y = tuple(left[right.index(d)] if d in right else a.ndim + d for d in range(b.ndim))
    return Contract.apply(a, b, spec=(of_x, of_y, (*[i for i in of_x if i not in of_y], *[i for i in of_y if i not in of_x])))


def _lettered(given: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The equation and the operands of (operand, list, operand, list, ..., list of the result or nothing)."""
    pairs = len(given) // 2
    lists = [*given[1:2 * pairs:2], *given[2 * pairs:]]
    if not pairs or not all(isinstance(numbers, list | tuple) for numbers in lists):
        raise ShapeError('einsum: expected an equation such as "ij->i" and operands, or operands each with a list of numbers '
                         "after it that name its dims")
    texts = []
    for numbers in lists:
        for i in numbers:
            if i is not ... and not (isinstance(i, int) and 0 <= i < len(LETTERS)):
                raise ShapeError(f"einsum: a list has {i!r}, expected numbers 0 ... {len(LETTERS) - 1}, or ... once")
        texts.append("".join("..." if i is ... else LETTERS[i] for i in numbers))
    return ",".join(texts[:pairs]) + (f"->{texts[-1]}" if len(texts) > pairs else ""), given[:2 * pairs:2]


@lru_cache(512)
def _parsed(equation: str, ndims: tuple[int, ...]) -> tuple[list[Index], Index]:
    """The index of each operand and of the result."""
    left, arrow, right = equation.partition("->")
    texts = left.split(",")
    if len(texts) != len(ndims):
        raise ShapeError(f'einsum: "{equation}" names {len(texts)} operands, found {len(ndims)}')
    parts = [_letters(equation, text, ndim) for text, ndim in zip(texts, ndims)]
    widest = max((sum(i < 0 for i in part) for part in parts), default=0)
    if arrow:
        result = _letters(equation, right, len(right.replace("...", "")) + (widest if "..." in right else 0))
    else:
        once = [i for part in parts for i in part if i >= 0]
        result = (*range(-widest, 0), *sorted(i for i in set(once) if once.count(i) == 1))
    known = {i for part in parts for i in part}
    if len(set(result)) < len(result) or not known.issuperset(result):
        raise ShapeError(f'einsum: the result of "{equation}" has a letter twice, or one that no operand has')
    return parts, result


def _letters(equation: str, text: str, ndim: int) -> Index:
    before, dots, after = text.partition("...")
    letters = before + after
    if not all(c.isalpha() and c.isascii() for c in letters) or (len(letters) != ndim if not dots else len(letters) > ndim):
        raise ShapeError(f'einsum: "{text}" in "{equation}" does not name the {ndim} dims of its operand; expected a letter '
                         "for each")
    hidden = range(-(ndim - len(letters)), 0)         # counted from the last, so that shorter ellipses broadcast
    return (*map(ord, before), *hidden, *map(ord, after))


def _sizes(equation: str, parts: list[Index], tensors: list[Tensor]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for part, x in zip(parts, tensors):
        for i, n in zip(part, x.shape):
            if sizes.setdefault(i, n) != n:
                if 1 not in (n, sizes[i]):
                    raise ShapeError(f'einsum: "{equation}" has {sizes[i]} and {n} for one index; shapes are '
                                     f"{', '.join(str(t.shape) for t in tensors)}")
                sizes[i] = sizes[i] if n == 1 else n
    return sizes


def _prepared(x: Tensor, part: Index, sizes: dict[int, int]) -> tuple[Tensor, Index]:
    """x without dims of size 1 that broadcast, and with one dim for each letter."""
    gone = [d for d, i in enumerate(part) if x.shape[d] == 1 != sizes[i]]
    if gone:
        x, part = reshape(x, [n for d, n in enumerate(x.shape) if d not in gone]), tuple(
            i for d, i in enumerate(part) if d not in gone)
    while len(set(part)) < len(part):
        twice = next(i for i in part if part.count(i) > 1)
        first = part.index(twice)
        second = part.index(twice, first + 1)
        x = diagonal(x, 0, first, second)         # the last dim
        part = (*[i for d, i in enumerate(part) if d not in (first, second)], twice)
    return x, part


@lru_cache(512)
def _path(parts: tuple[Index, ...], result: Index, sizes: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    """Which operands are contracted next; results go to the end."""
    if len(parts) <= 2:
        return [tuple(range(len(parts)))]
    names = {i: chr(ord("a") + k if k < 26 else ord("A") + k - 26) for k, (i, _) in enumerate(sizes)}
    if len(names) > 52:
        raise ShapeError(f"einsum: {len(names)} indices, expected at most 52")
    lengths = dict(sizes)
    known = {i for part in parts for i in part}
    equation = ",".join("".join(names[i] for i in part) for part in parts)
    shapes = [np.broadcast_to(np.float32(0), [lengths[i] for i in part]) for part in parts]
    path = np.einsum_path(f"{equation}->{''.join(names[i] for i in result if i in known)}", *shapes, optimize="optimal" if len(
        parts) <= 6 else "greedy")[0]
    return [tuple(step) for step in path[1:]]


def _summed(x: Tensor, index: Index, kept: set[int]) -> tuple[Tensor, Index]:
    """x without the dims that are not kept."""
    gone = tuple(d for d, i in enumerate(index) if i not in kept)
    return (total(x, gone), tuple(i for i in index if i in kept)) if gone else (x, index)


def _pair(left: tuple[Tensor, Index], right: tuple[Tensor, Index], kept: set[int]) -> tuple[Tensor, Index]:
    x, of_x = _summed(*left, kept.union(right[1]))
    y, of_y = _summed(*right, kept.union(left[1]))
    result = (*[i for i in of_x if i in kept and i in of_y],
              *[i for i in of_x if i not in of_y], *[i for i in of_y if i not in of_x])
    return Contract.apply(x, y, spec=(of_x, of_y, result)), result


class Contract(Function):
    """The sum over the indices that both have and the result has not; each index is in two of the three, or in all."""

    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, y: Array, *, spec: Spec) -> Array:
        ctx.save(x, y)
        ctx.spec = spec
        return _contracted(ctx.xp, x, y, spec)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        (x, y), (of_x, of_y, result) = ctx.saved, ctx.spec
        return (_contracted(ctx.xp, grad, y, (result, of_y, of_x)) if ctx.needs[0] else None,
                _contracted(ctx.xp, x, grad, (of_x, result, of_y)) if ctx.needs[1] else None)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        of_x, of_y, result = ctx.spec
        return (Contract.apply(grad, ctx.input(1), spec=(result, of_y, of_x)) if ctx.needs[0] else None,
                Contract.apply(ctx.input(0), grad, spec=(of_x, result, of_y)) if ctx.needs[1] else None)


def _contracted(xp: Any, x: Array, y: Array, spec: Spec) -> Array:
    plan = _plan(spec)
    if plan is None:
        return _multiplied(x, y, spec)
    swapped, x_order, y_order, batch, rows, terms, back = plan
    if swapped:
        x, y = y, x
    x, y = x.transpose(x_order), y.transpose(y_order)
    shape = (*x.shape[:batch + rows], *y.shape[batch + terms:])
    b, m, n = prod(shape[:batch]), prod(shape[batch:batch + rows]), prod(shape[batch + rows:])
    k = prod(y.shape[batch:batch + terms])
    if batch == 0:
        made = product(_matrix(xp, x, m, k), _matrix(xp, y, k, n))
    else:
        made = products(_blocks(xp, x, (b, m, k)), _blocks(xp, y, (b, k, n)))
    return made.reshape(shape).transpose(back)


def _matrix(xp: Any, x: Array, rows: int, columns: int) -> Array:
    return _blocks(xp, x, (1, rows, columns))[0]


def _blocks(xp: Any, x: Array, shape: tuple[int, int, int]) -> Array:
    """Matrices in memory that BLAS takes: other strides fall to a plain loop."""
    x = x.reshape(shape)
    _, rows, columns = x.strides
    size = x.itemsize
    if (columns == size and rows >= size * shape[2]) or (rows == size and columns >= size * shape[1]):
        return x
    return xp.ascontiguousarray(x)


@lru_cache(1024)
def _plan(spec: Spec) -> Any:
    """(swapped, orders of both operands' dims, numbers of batch, row and summed dims, order of the result), or None: a product.

    The operand whose own dims come first in the result is on the left.
    """
    of_x, of_y, result = spec
    batch = [i for i in of_x if i in of_y and i in result]
    terms = [i for i in of_x if i in of_y and i not in result]
    x_only, y_only = [i for i in of_x if i not in of_y], [i for i in of_y if i not in of_x]
    if not terms:
        return None
    own = [i for i in result if i not in batch]
    swapped = bool(own) and own[0] in y_only
    if swapped:
        of_x, of_y, x_only, y_only = of_y, of_x, y_only, x_only
    made = [*batch, *x_only, *y_only]
    return (swapped, tuple(map(of_x.index, (*batch, *x_only, *terms))), tuple(map(of_y.index, (*batch, *terms, *y_only))),
            len(batch), len(x_only), len(terms), tuple(map(made.index, result)))


def _multiplied(x: Array, y: Array, spec: Spec) -> Array:
    of_x, of_y, result = spec
    x, y = (a.transpose([index.index(i) for i in result if i in index]).reshape(
        [a.shape[index.index(i)] if i in index else 1 for i in result]) for a, index in ((x, of_x), (y, of_y)))
    return x * y
