"""One layer of an LSTM, GRU or RNN over whole sequences, from the products with its inputs; and its gradient.

Rows are those of a packed batch: the sequences stand from the longest to the shortest, and step t has the rows of the first
`sizes[t]` of them, after those of step t - 1. `reverse` runs from the last step to the first. All functions work in place and
return nothing. Letters: `R` rows, `B` batch, `H` hidden, `P` numbers of the state h (H unless it is projected), `K` gates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.native import load
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, host, misfit
from mpitrain.kernels.pointwise import _sigmoid as sigmoid
from mpitrain.kernels.product import products

Steps = Iterator[tuple[int, int, int, int]]


def walk(sizes: Array, reverse: bool) -> Steps:
    """For each step in the order of time: its first row, its number of rows, and the same of the step before it (0, 0: none)."""
    counts = [int(size) for size in sizes]
    first, before = sum(counts) if reverse else 0, (0, 0)
    for count in reversed(counts) if reverse else counts:
        first -= count if reverse else 0
        yield first, count, *before
        before = first, count
        first += 0 if reverse else count


def previous(values: Array, start: Array, sizes: Array, reverse: bool) -> Array:
    """For each row of `values` (R, ...) that of the step before in time; `start` (B, ...) stands before the first one."""
    result = array_module(values).empty_like(values)
    for first, count, before, known in walk(sizes, reverse):
        known = min(known, count)
        result[first:first + known] = values[before:before + known]
        result[first + known:first + count] = start[known:count]
    return result


def backwards(sizes: Array, reverse: bool) -> list[tuple[int, int, int, int]]:
    return [*walk(sizes, reverse)][::-1]


def before_in_time(values: Array, start: Array, count: int, before: int, known: int) -> Array:
    known = min(known, count)
    if known == count:
        return values[before:before + count]
    return array_module(values).concatenate([values[before:before + known], start[known:count]])


def _lstm(gates: Array, h: Array, c: Array, out: Array, cells: Array, raw: Array | None, weight: Array, projection: Array | None,
          sizes: Array, reverse: bool) -> None:
    xp, n = array_module(gates), c.shape[1]
    for first, count, _, _ in walk(sizes, reverse):
        a, rows = gates[first:first + count], slice(first, first + count)
        a += products(h[:count], weight.T)
        a[:, :2 * n], a[:, 2 * n:3 * n], a[:, 3 * n:] = sigmoid(a[:, :2 * n]), xp.tanh(a[:, 2 * n:3 * n]), sigmoid(a[:, 3 * n:])
        i, f, g, o = (a[:, k * n:(k + 1) * n] for k in range(4))
        c[:count] = f * c[:count] + i * g
        cells[rows] = c[:count]
        made = o * xp.tanh(c[:count])
        if projection is not None and raw is not None:
            raw[rows] = made
            made = products(made, projection.T)
        out[rows] = h[:count] = made


def _lstm_gradients(gates: Array, dout: Array, dh: Array, dc: Array, c: Array, cells: Array, projected: Array | None,
                    weight: Array, projection: Array | None, sizes: Array, reverse: bool) -> None:
    xp, n = array_module(gates), c.shape[1]
    for first, count, *before in backwards(sizes, reverse):
        a, rows = gates[first:first + count], slice(first, first + count)
        i, f, g, o = (a[:, k * n:(k + 1) * n] for k in range(4))
        by_h = dh[:count] + dout[rows]
        if projection is not None and projected is not None:
            projected[rows] = by_h
            by_h = products(by_h, projection)
        t = xp.tanh(cells[rows])
        by_c = dc[:count] + by_h * o * (1 - t * t)
        dc[:count] = by_c * f
        a[...] = xp.concatenate([by_c * g * (i * (1 - i)), by_c * before_in_time(cells, c, count, *before) * (f * (1 - f)),
                                 by_c * i * (1 - g * g), by_h * t * (o * (1 - o))], axis=1)
        dh[:count] = products(a, weight)


def _gru(gates: Array, h: Array, out: Array, inner: Array, weight: Array, bias: Array | None, sizes: Array, reverse: bool
         ) -> None:
    xp, n = array_module(gates), h.shape[1]
    for first, count, _, _ in walk(sizes, reverse):
        a, rows = gates[first:first + count], slice(first, first + count)
        state = products(h[:count], weight.T)
        if bias is not None:
            state += bias
        a[:, :2 * n] = sigmoid(a[:, :2 * n] + state[:, :2 * n])
        inner[rows] = state[:, 2 * n:]
        r, z, new = (a[:, k * n:(k + 1) * n] for k in range(3))
        new[...] = xp.tanh(new + r * inner[rows])
        out[rows] = h[:count] = new + z * (h[:count] - new)


def _gru_gradients(gates: Array, states: Array, dout: Array, dh: Array, h: Array, out: Array, inner: Array, weight: Array,
                   sizes: Array, reverse: bool) -> None:
    xp, n = array_module(gates), h.shape[1]
    for first, count, *before in backwards(sizes, reverse):
        a, rows = gates[first:first + count], slice(first, first + count)
        r, z, new = (a[:, k * n:(k + 1) * n] for k in range(3))
        by_h = dh[:count] + dout[rows]
        by_new = by_h * (1 - z) * (1 - new * new)
        by_z = by_h * (before_in_time(out, h, count, *before) - new) * (z * (1 - z))
        by_r = by_new * inner[rows] * (r * (1 - r))
        states[rows] = xp.concatenate([by_r, by_z, by_new * r], axis=1)
        dh[:count] = by_h * z + products(states[rows], weight)
        a[...] = xp.concatenate([by_r, by_z, by_new], axis=1)


def _rnn(gates: Array, h: Array, out: Array, weight: Array, sizes: Array, reverse: bool, relu: bool) -> None:
    xp = array_module(gates)
    for first, count, _, _ in walk(sizes, reverse):
        a = gates[first:first + count]
        a += products(h[:count], weight.T)
        out[first:first + count] = h[:count] = xp.maximum(a, a.dtype.type(0)) if relu else xp.tanh(a)


def _rnn_gradients(gates: Array, dout: Array, dh: Array, out: Array, weight: Array, sizes: Array, reverse: bool, relu: bool
                   ) -> None:
    xp = array_module(gates)
    for first, count, _, _ in backwards(sizes, reverse):
        y = out[first:first + count]
        by_h = dh[:count] + dout[first:first + count]
        a = gates[first:first + count] = xp.where(y <= 0, by_h.dtype.type(0), by_h) if relu else by_h * (1 - y * y)
        dh[:count] = products(a, weight)


@cache
def _memory(dtype: Any, hidden: int, state: int, gates: int) -> int:
    """The bytes that C packs weights in; loops of Numba leave products to BLAS."""
    library = load("recurrent")
    if library is None:
        return 0
    count = getattr(library, f"recurrent_memory_{dtype.name}")
    count.restype, count.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    return int(count(hidden, state, gates)) * int(dtype.itemsize)


_scratch = Scratch()


def _check(name: str, sizes: Array, batch: int, rest: bool, *shapes: tuple[Array | None, int, int]) -> None:
    """What C takes the sizes of arrays from: how many samples go on at each step, never more than before."""
    rows = shapes[0][1]
    if not rest or sizes.ndim != 1 or int(sizes.sum()) != rows or (len(sizes) and (
            sizes[0] > batch or sizes[-1] < 0 or bool((sizes[1:] > sizes[:-1]).any()))):
        misfit(f"{name} of {batch} samples", sizes, rows)
    for array, *shape in shapes:
        if array is not None and array.shape != tuple(shape):
            misfit(name, array, tuple(shape))


@host("recurrent", "lstm", "X! X! X! X! X! X?! X X? L:t M! it i i i")
def _lstm_host(call: CFunction, gates: Array, h: Array, c: Array, out: Array, cells: Array, raw: Array | None, weight: Array,
               projection: Array | None, sizes: Array, reverse: bool) -> None:
    (batch, n), p, rows = c.shape, h.shape[1], len(gates)
    _check("lstm", sizes, batch, n == p if projection is None else raw is not None, (gates, rows, 4 * n), (h, batch, p),
           (out, rows, p), (cells, rows, n), (raw, rows, n), (weight, 4 * n, p), (projection, p, n))
    call(gates, h, c, out, cells, raw, weight, projection, sizes, _scratch.room(_memory(gates.dtype, n, p, 4)), len(sizes), n, p,
         reverse)


@host("recurrent", "lstm_gradients", "X! X X! X! X X X?! X X? L:t M! it i i i")
def _lstm_gradients_host(call: CFunction, gates: Array, dout: Array, dh: Array, dc: Array, c: Array, cells: Array,
                         projected: Array | None, weight: Array, projection: Array | None, sizes: Array, reverse: bool) -> None:
    (batch, n), p, rows = c.shape, dh.shape[1], len(gates)
    _check("lstm_gradients", sizes, batch, n == p if projection is None else projected is not None, (gates, rows, 4 * n),
           (dout, rows, p), (dh, batch, p), (dc, batch, n), (cells, rows, n), (projected, rows, p), (weight, 4 * n, p),
           (projection, p, n))
    call(gates, dout, dh, dc, c, cells, projected, weight, projection, sizes, _scratch.room(_memory(gates.dtype, n, p, 4)),
         len(sizes), n, p, reverse)


@host("recurrent", "gru", "X! X! X! X! X X? L:t M! it i i")
def _gru_host(call: CFunction, gates: Array, h: Array, out: Array, inner: Array, weight: Array, bias: Array | None, sizes: Array,
              reverse: bool) -> None:
    (batch, n), rows = h.shape, len(gates)
    _check("gru", sizes, batch, True, (gates, rows, 3 * n), (out, rows, n), (inner, rows, n), (weight, 3 * n, n))
    if bias is not None and bias.size != 3 * n:
        misfit("gru", bias)
    call(gates, h, out, inner, weight, bias, sizes, _scratch.room(_memory(gates.dtype, n, n, 3)), len(sizes), n, reverse)


@host("recurrent", "gru_gradients", "X! X! X X! X X X X L:t M! it i i")
def _gru_gradients_host(call: CFunction, gates: Array, states: Array, dout: Array, dh: Array, h: Array, out: Array, inner: Array,
                        weight: Array, sizes: Array, reverse: bool) -> None:
    (batch, n), rows = h.shape, len(gates)
    _check("gru_gradients", sizes, batch, True, (gates, rows, 3 * n), (states, rows, 3 * n), (dout, rows, n), (dh, batch, n),
           (out, rows, n), (inner, rows, n), (weight, 3 * n, n))
    call(gates, states, dout, dh, h, out, inner, weight, sizes, _scratch.room(_memory(gates.dtype, n, n, 3)), len(sizes), n,
         reverse)


@host("recurrent", "rnn", "X! X! X! X L:t M! it i i i")
def _rnn_host(call: CFunction, gates: Array, h: Array, out: Array, weight: Array, sizes: Array, reverse: bool, relu: bool
              ) -> None:
    (batch, n), rows = h.shape, len(gates)
    _check("rnn", sizes, batch, True, (gates, rows, n), (out, rows, n), (weight, n, n))
    call(gates, h, out, weight, sizes, _scratch.room(_memory(gates.dtype, n, n, 1)), len(sizes), n, reverse, relu)


@host("recurrent", "rnn_gradients", "X! X X! X X L:t M! it i i i")
def _rnn_gradients_host(call: CFunction, gates: Array, dout: Array, dh: Array, out: Array, weight: Array, sizes: Array,
                        reverse: bool, relu: bool) -> None:
    (batch, n), rows = dh.shape, len(gates)
    _check("rnn_gradients", sizes, batch, True, (gates, rows, n), (dout, rows, n), (out, rows, n), (weight, n, n))
    call(gates, dout, dh, out, weight, sizes, _scratch.room(_memory(gates.dtype, n, n, 1)), len(sizes), n, reverse, relu)


lstm = Kernel("lstm", _lstm, _lstm_host, _lstm_host.composed("recurrent"))
"""From gates (R, 4 H; input, forget, cell, output): the products with the inputs, with all biases. h (B, P) and c (B, H) go from
the first states to the last; out (R, P) takes every h, cells (R, H) every c, raw (R, H) every o tanh c where `projection` (P, H)
is not None. gates take what their functions make of them. weight (4 H, P)."""

lstm_gradients = Kernel("lstm_gradients", _lstm_gradients, _lstm_gradients_host, _lstm_gradients_host.composed("recurrent"))
"""gates go from their values to the gradients of the products; dh, dc from the gradients of the last states to those of the
first. dout (R, P) is out's, c (B, H) the first state; `projected` (R, P) takes the gradients of h where that is projected."""

gru = Kernel("gru", _gru, _gru_host, _gru_host.composed("recurrent"))
"""From gates (R, 3 H; reset, update, new): the products with the inputs, and their biases. inner (R, H) takes what the new gate
has of the state. weight (3 H, H), bias (3 H,)."""

gru_gradients = Kernel("gru_gradients", _gru_gradients, _gru_gradients_host, _gru_gradients_host.composed("recurrent"))
"""Like `lstm_gradients`; states (R, 3 H) takes the gradients of the products with the state."""

rnn = Kernel("rnn", _rnn, _rnn_host, _rnn_host.composed("recurrent"))
"""tanh or relu of gates (R, H), the products with the inputs, plus those with the state."""

rnn_gradients = Kernel("rnn_gradients", _rnn_gradients, _rnn_gradients_host, _rnn_gradients_host.composed("recurrent"))
