"""Attention by blocks of BLOCK queries and BLOCK keys, with a matrix product of NumPy for each two: what defines flash attention.

Every block is filled up with zeros to its whole size, and hidden weights are 0: so products have one shape, and a query's result
has the same bits whatever else is in the batch and whatever keys follow that it does not see. What is between the products
comes as functions: expressions of arrays here, loops of Numba in `kernels.loops.attention`. Letters as in `flash_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.dropout import Dropping

BLOCK = 64


class Between(NamedTuple):
    """What is done with a block of scores s (B, H, BLOCK, BLOCK), in place; the others are (B, H, BLOCK)."""

    weigh: Any                        # (s, tops, sums) -> factors: s = exp(s - larger tops); what was summed before is corrected
    slopes: Any                       # (s, slopes, tops, inverses, means, scale): s = weights, slopes = gradients of the scores
    rescale: Any                      # (total (B, H, BLOCK, E), factors): total *= factors, row by row
    factor: Any                       # what a product takes of an array


def weigh(s: Array, tops: Array, sums: Array) -> Array:
    xp = array_module(s)
    largest = xp.maximum(tops, s.max(axis=-1))
    base = xp.where(largest == -float("inf"), largest.dtype.type(0), largest)        # each exp is 0 then, or NaN
    factors = xp.exp(tops - base)
    tops[...] = largest
    s -= base[..., None]
    xp.exp(s, out=s)
    sums *= factors
    sums += s.sum(axis=-1)
    return factors


def slopes(s: Array, slopes: Array, tops: Array, inverses: Array, means: Array, scale: float) -> None:
    s -= tops[..., None]
    array_module(s).exp(s, out=s)
    s *= inverses[..., None]
    slopes -= means[..., None]
    slopes *= s
    slopes *= slopes.dtype.type(scale)


def rescale(total: Array, factors: Array) -> None:
    total *= factors[..., None]


def as_it_is(x: Array) -> Array:
    return x


EXPRESSIONS = Between(weigh, slopes, rescale, as_it_is)


def _block(x: Array, rows: slice) -> Array:
    """BLOCK rows of x (B, H, L, ...) without gaps, zeros where there are none."""
    xp = array_module(x)
    result = xp.empty((*x.shape[:2], BLOCK, *x.shape[3:]), x.dtype)
    there = min(BLOCK, x.shape[2] - rows.start)
    result[:, :, :there] = x[:, :, rows]
    result[:, :, there:] = 0
    return result


def _blocks(stop: int) -> Iterator[slice]:
    for first in range(0, stop, BLOCK):
        yield slice(first, first + BLOCK)


def _hide(s: Array, rows: slice, columns: slice, keys: int, causal: bool, value: float) -> None:
    """Writes `value` where a query may not look, or where no key is."""
    if columns.stop > keys:
        s[..., keys - columns.start:] = value
    if causal and columns.stop > rows.start + 1:
        xp = array_module(s)
        later = xp.arange(columns.start, columns.stop) > xp.arange(rows.start, rows.stop)[:, None]
        xp.copyto(s, s.dtype.type(value), where=later)


def _drop(s: Array, factors: Array | None, rows: slice, columns: slice) -> Array:
    """NaN that is dropped is gone."""
    if factors is None:
        return s
    xp = array_module(s)
    here = factors[:, :, rows, columns]
    result = xp.zeros_like(s)
    part = result[:, :, :here.shape[2], :here.shape[3]]
    part[...] = xp.where(here == 0, here, s[:, :, :here.shape[2], :here.shape[3]] * here)
    return result


def _factors(dropping: Dropping | None, q: Array, k: Array) -> Array | None:
    if dropping is None:
        return None
    return dropping.factors(array_module(q).broadcast_to(q.dtype.type(0), (*q.shape[:3], k.shape[2])))


@np.errstate(invalid="ignore", over="ignore")              # NaN where the numbers ask for it, also in rows that are filled up
def forward(between: Between, q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool,
            dropping: Dropping | None = None) -> tuple[Array, Array]:
    xp = array_module(q)
    queries, keys, factor = q.shape[2], k.shape[2], between.factor
    tops, inverses = xp.empty((2, *q.shape[:3]), q.dtype)
    factors = _factors(dropping, q, k)
    for rows in _blocks(queries):
        part = _block(q, rows)
        part *= part.dtype.type(scale)
        top = xp.full(part.shape[:3], -float("inf"), q.dtype)
        total, sums = xp.zeros((*part.shape[:3], v.shape[3]), q.dtype), xp.zeros(top.shape, q.dtype)
        for columns in _blocks(min(rows.stop, keys) if causal else keys):
            s = xp.matmul(factor(part), factor(_block(k, columns)).swapaxes(-1, -2))
            _hide(s, rows, columns, keys, causal, -float("inf"))
            change = between.weigh(s, top, sums)
            if columns.start:
                between.rescale(total, change)
            total += xp.matmul(factor(_drop(s, factors, rows, columns)), factor(_block(v, columns)))
        inverse = xp.where(sums == 0, sums, 1 / xp.where(sums == 0, sums.dtype.type(1), sums))
        between.rescale(total, inverse)
        there = min(BLOCK, queries - rows.start)
        out[:, :, rows] = total[:, :, :there]
        tops[:, :, rows] = xp.where(top == -float("inf"), top.dtype.type(0), top)[:, :, :there]      # no score at all: zeros
        inverses[:, :, rows] = inverse[:, :, :there]
    return tops, inverses


@np.errstate(invalid="ignore", over="ignore")
def backward(between: Between, q: Array, k: Array, v: Array, out: Array, grad: Array, tops: Array, inverses: Array, scale: float,
             causal: bool, dq: Array | None, dk: Array | None, dv: Array | None, dropping: Dropping | None = None) -> None:
    xp = array_module(q)
    keys, factors, factor = k.shape[2], _factors(dropping, q, k), between.factor
    for wanted in (dk, dv):
        if wanted is not None:
            wanted[...] = 0
    for rows in _blocks(q.shape[2]):
        part, slope = _block(q, rows), _block(grad, rows)
        part, scaled, slope = factor(part), factor(part * part.dtype.type(scale)), factor(slope)
        known = [_block(tops, rows), _block(inverses, rows), (slope * _block(out, rows)).sum(axis=-1)]
        by_q = None if dq is None else xp.zeros(part.shape, part.dtype)
        for columns in _blocks(min(rows.stop, keys) if causal else keys):
            there, k_here = min(BLOCK, keys - columns.start), factor(_block(k, columns))
            s = xp.matmul(scaled, k_here.swapaxes(-1, -2))
            _hide(s, rows, columns, keys, causal, -float("inf"))
            ds = _drop(xp.matmul(slope, factor(_block(v, columns)).swapaxes(-1, -2)), factors, rows, columns)
            between.slopes(s, ds, *known, scale)
            if dv is not None:
                weights = factor(_drop(s, factors, rows, columns))
                dv[:, :, columns] += xp.matmul(weights.swapaxes(-1, -2), slope)[:, :, :there]
            _hide(ds, rows, columns, keys, causal, 0.0)
            ds = factor(ds)
            if by_q is not None:
                by_q += xp.matmul(ds, k_here)
            if dk is not None:
                dk[:, :, columns] += xp.matmul(ds.swapaxes(-1, -2), part)[:, :, :there]
        if dq is not None and by_q is not None:
            dq[:, :, rows] = by_q[:, :, :min(BLOCK, q.shape[2] - rows.start)]
