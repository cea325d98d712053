"""Scans, ranks, and values taken from or put at places, along one dim."""

from __future__ import annotations

from collections.abc import Callable
from math import prod as _product
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.backend.ufuncs import accumulated
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, misfit, packed, suits_c


def sizes(x: Array, dim: int) -> tuple[int, int, int]:
    """How many lines stand outside of `dim`, how long they are, and how many numbers lie inside."""
    return _product(x.shape[:dim]), x.shape[dim], _product(x.shape[dim + 1:])


def _running(name: str, x: Array, dim: int, back: bool) -> Array:
    """Of float32 in float64, as PyTorch's: rounding would grow with the length."""
    function = getattr(array_module(x), name)
    step = (slice(None),) * dim + (slice(None, None, -1 if back else 1),)
    if x.dtype.kind in "biu":
        return function(x[step], axis=dim, dtype="int64")[step]
    return function(x[step], axis=dim, dtype="float64" if x.dtype == "float32" else None).astype(x.dtype)[step]


def _scan(name: str) -> Kernel:
    def reference(x: Array, dim: int, back: bool = False) -> Array:
        return _running(name, x, dim, back)

    @host("lines", name, "X:onk X!:onk io in ik i")
    def run(function: CFunction, x: Array, dim: int, back: bool = False) -> Array:
        if not suits_c(x):
            return reference(x, dim, back)
        y = np.empty(x.shape, x.dtype)
        function(packed(x), y, *sizes(x, dim), back)
        return y
    return Kernel(name, reference, run, run.loop("lines"))


def _cumprod_gradient(x: Array, grad: Array) -> Array:
    """g_k = p_k s_k: p_k is the product of what comes before k, s_k = grad_k + x_{k+1} s_{k+1}."""
    result, n = grad.copy(), x.shape[-1]
    for k in range(n - 2, -1, -1):
        result[..., k] += x[..., k + 1] * result[..., k + 1]
    result[..., 1:] *= _before(x)
    return result


def _prod_gradient(x: Array, grad: Array) -> Array:
    back = (..., slice(None, None, -1))
    result = array_module(x).empty(x.shape, x.dtype)
    result[...] = grad[..., None]
    result[..., 1:] *= _before(x)
    result[..., :-1] *= _before(x[back])[back]
    return result


def _before(x: Array) -> Array:
    """The products of what comes before each number but the first."""
    return array_module(x).cumprod(x[..., :-1], axis=-1)


def _gradient(name: str, reference: Callable[..., Array], of: str) -> Kernel:
    @host("lines", name, f"X:ln X:{of} X!:ln il in")
    def run(function: CFunction, x: Array, grad: Array) -> Array:
        if not suits_c(x) or not x.shape[-1]:
            return reference(x, grad)
        result = np.empty(x.shape, x.dtype)
        function(packed(x), packed(grad), result, x.size // x.shape[-1], x.shape[-1])
        return result
    return Kernel(name, reference, run, run.loop("lines"))


def _prod(x: Array) -> Array:
    """Of float32 in float64, as `_running`'s."""
    if x.dtype.kind in "biu":
        return array_module(x).asarray(x.prod(axis=-1, dtype="int64"))
    return array_module(x).asarray(x.prod(axis=-1, dtype="float64" if x.dtype == "float32" else None)).astype(x.dtype)


@host("lines", "prod", "X:ln X!:l il in")
def _prod_host(function: CFunction, x: Array) -> Array:
    if not suits_c(x):
        return _prod(x)
    y = np.empty(x.shape[:-1], x.dtype)
    function(packed(x), y, y.size, x.shape[-1])
    return y


def _cumextremum(x: Array, dim: int, smallest: bool) -> Array:
    xp = array_module(x)
    if not 0 <= dim < x.ndim:
        misfit(f"cumextremum along dim {dim}", x)
    running = accumulated("minimum" if smallest else "maximum", x, dim)
    places = xp.arange(x.shape[dim], dtype="int64").reshape((-1,) + (1,) * (x.ndim - 1 - dim))
    return accumulated("maximum", xp.where((x == running) | (x != x), places, 0), dim)


@host("lines", "cumextremum", "X:onk L!:onk io in ik i")
def _cumextremum_host(function: CFunction, x: Array, dim: int, smallest: bool) -> Array:
    if not suits_c(x):
        return _cumextremum(x, dim, smallest)
    places = np.empty(x.shape, np.int64)
    function(packed(x), places, *sizes(x, dim), smallest)
    return places


def order(x: Array, dim: int, descending: bool) -> Array:
    """The places of the values in order, NaN as the largest; equal values in their order."""
    argsort = array_module(x).argsort
    if not descending:
        return argsort(x, axis=dim, kind="stable").astype("int64")
    back = (slice(None),) * dim + (slice(None, None, -1),)      # a stable sort of the reversed values, reversed
    return (x.shape[dim] - 1 - argsort(x[back], axis=dim, kind="stable")[back]).astype("int64")


def _extreme(x: Array, k: int, largest: bool) -> Array:
    return order(x, x.ndim - 1, largest)[..., :k]


@host("lines", "smallest", "X:ln L!:lk il in ik i", answers=True)
def _extreme_host(function: CFunction, x: Array, k: int, largest: bool) -> Array:
    n = x.shape[-1]
    if not suits_c(x) or not x.size or 4 * k > n:
        return _extreme(x, k, largest)
    places = np.empty((*x.shape[:-1], k), np.int64)
    function(packed(x), places, x.size // n, n, k, largest)
    return np.take_along_axis(places, order(np.take_along_axis(x, places, -1), x.ndim - 1, largest), -1)


def _place_of_rank(x: Array, ranks: Array) -> Array:
    _counted(ranks)
    return array_module(x).take_along_axis(order(x, x.ndim - 1, False), ranks, axis=-1)


@host("lines", "place_of_rank", "X:ln L:l L!:l il in", answers=True)
def _place_of_rank_host(function: CFunction, x: Array, ranks: Array) -> Array:
    if not suits_c(x) or not x.size:
        return _place_of_rank(x, ranks)
    places = np.empty(ranks.shape, np.int64)
    function(packed(x), packed(ranks, np.int64), places, ranks.size, x.shape[-1])
    return places


def grid(xp: Any, index: Array, dim: int) -> tuple[Array, ...]:
    """Integer arrays that choose x[i, j, index[i, j, k]] for dim 2 of 3, and so on."""
    n = index.ndim
    return tuple(index if d == dim else xp.arange(index.shape[d]).reshape((-1,) + (1,) * (n - 1 - d)) for d in range(n))


def _counted(index: Array) -> None:
    """IndexError where an index is below 0, which NumPy counts from the end, and C refuses."""
    if index.size and index.min() < 0:
        raise IndexError("an index is below 0")


def _gather(x: Array, index: Array, dim: int) -> Array:
    _counted(index)
    return x[grid(array_module(x), index, dim)]


@host("lines", "gather", "X:onk L:omk X!:omk io in ik im", answers=True)
def _gather_host(function: CFunction, x: Array, index: Array, dim: int) -> Array:
    if not suits_c(x):
        return _gather(x, index, dim)
    if index.ndim != x.ndim or any(d != dim and n > x.shape[d] for d, n in enumerate(index.shape)):
        misfit("gather", x, index)
    x = x[tuple(slice(None) if d == dim else slice(0, n) for d, n in enumerate(index.shape))]
    y = np.empty(index.shape, x.dtype)
    function(packed(x), packed(index, np.int64), y, *sizes(x, dim), index.shape[dim])
    return y


def _scatter(out: Array, index: Array, source: Array, dim: int, add: bool) -> Array:
    xp = array_module(out)
    _counted(index)
    if add:
        xp.add.at(out, grid(xp, index, dim), source)
    else:
        out[grid(xp, index, dim)] = source
    return out


@host("lines", "scatter", "X!:onk L:omk X:omk io in ik im i", answers=True)
def _scatter_host(function: CFunction, out: Array, index: Array, source: Array, dim: int, add: bool) -> Array:
    same = all(d == dim or out.shape[d] == n for d, n in enumerate(index.shape)) and index.shape == source.shape
    if not same or not suits_c(out) or source.dtype != out.dtype or not (out.flags.c_contiguous and out.flags.aligned):
        return _scatter(out, index, source, dim, add)
    function(out, packed(index, np.int64), packed(source), *sizes(out, dim), index.shape[dim], add)
    return out


def _triangle(x: Array, diagonal: int, upper: bool) -> Array:
    xp = array_module(x)
    rows, columns = (xp.arange(n) for n in x.shape[-2:])
    distance = columns - rows[:, None]
    return xp.where(distance >= diagonal if upper else distance <= diagonal, x, x.dtype.type(0))


@host("lines", "triangle", "X:brc X!:brc ib ir ic i i")
def _triangle_host(function: CFunction, x: Array, diagonal: int, upper: bool) -> Array:
    if not suits_c(x):
        return _triangle(x, diagonal, upper)
    y = np.empty(x.shape, x.dtype)
    function(packed(x), y, _product(x.shape[:-2]), *x.shape[-2:], max(-x.shape[-2], min(diagonal, x.shape[-1])), upper)
    return y


cumsum, cumprod = _scan("cumsum"), _scan("cumprod")
"""Running sums and products along `dim`, from (x, dim, back=False); `back`: from the end."""
cumprod_gradient = _gradient("cumprod_gradient", _cumprod_gradient, "ln")
prod_gradient = _gradient("prod_gradient", _prod_gradient, "l")
"""Those of `cumprod` along the last dim, and of `prod`, from (x, grad)."""
prod = Kernel("prod", _prod, _prod_host, _prod_host.loop("lines"))
"""The product of the last dim."""
cumextremum = Kernel("cumextremum", _cumextremum, _cumextremum_host, _cumextremum_host.loop("lines"))
"""Where the largest or smallest number so far is (int64), the last place at a tie, from (x, dim, smallest)."""
extreme = Kernel("extreme", _extreme, _extreme_host, _extreme_host.loop("lines"))
"""The places of the k smallest or largest numbers of the last dim in order, from (x, k, largest)."""
place_of_rank = Kernel("place_of_rank", _place_of_rank, _place_of_rank_host, _place_of_rank_host.loop("lines"))
"""The place of the number of that rank in the last dim, from (x, ranks (..., 1))."""
gather = Kernel("gather", _gather, _gather_host, _gather_host.loop("lines"))
"""x[i, index[i, j]] for dim 1 of two, and so on, from (x, index, dim)."""
scatter = Kernel("scatter", _scatter, _scatter_host, _scatter_host.loop("lines"))
"""Puts or adds `source` at those places of `out`, in place and in the order of the index, from (out, index, source, dim, add)."""
triangle = Kernel("triangle", _triangle, _triangle_host, _triangle_host.loop("lines"))
"""The lower or upper triangles of matrices, 0 elsewhere, from (x, diagonal, upper)."""
