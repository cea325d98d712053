"""Gates of recurrent layers as in native/gates.h: the same operations in the same order. The products with the state are BLAS's.

Each loop reads few arrays and writes one: of more LLVM does not find out that they are apart, and makes no vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.loops.mathematics import choose, fma, sigmoid, tanh
from mpitrain.kernels.loops.typed import loop
from mpitrain.kernels.recurrent import backwards, before_in_time, walk


@register_jitable
def apply_sigmoid(part: Any, to: Any) -> None:
    for j in range(to.size):
        to[j] = sigmoid(part[j])


@register_jitable
def apply_tanh(part: Any, to: Any) -> None:
    for j in range(to.size):
        to[j] = tanh(part[j])


@register_jitable
def add(x: Any, y: Any, to: Any) -> None:
    for j in range(to.size):
        to[j] = x[j] + y[j]


@loop("X!:4rn X:4rn X!:rn X!:rn X!:rn ir in")
def _lstm_gates(gates: Any, state: Any, c: Any, cells: Any, h: Any, rows: int, n: int) -> None:
    part = np.empty(4 * n, gates.dtype)
    for r in range(rows):
        a, cell, kept = gates[4 * n * r:4 * n * (r + 1)], c[n * r:n * (r + 1)], cells[n * r:n * (r + 1)]
        made = h[n * r:n * (r + 1)]
        add(a, state[4 * n * r:4 * n * (r + 1)], part)
        apply_sigmoid(part[:2 * n], a[:2 * n])
        apply_tanh(part[2 * n:3 * n], a[2 * n:3 * n])
        apply_sigmoid(part[3 * n:], a[3 * n:])
        i, f, g, o = a[:n], a[n:2 * n], a[2 * n:3 * n], a[3 * n:]
        for j in range(n):
            part[j] = i[j] * g[j]
        for j in range(n):
            kept[j] = fma(f[j], cell[j], part[j])
        apply_tanh(kept, part[:n])
        for j in range(n):
            cell[j] = kept[j]
        for j in range(n):
            made[j] = o[j] * part[j]


@loop("X!:4rn X:rn X!:rn X:rn X:rn ir in")
def _lstm_gates_back(gates: Any, dh: Any, dc: Any, now: Any, before: Any, rows: int, n: int) -> None:
    part, t, by_c = np.empty(4 * n, gates.dtype), np.empty(n, gates.dtype), np.empty(n, gates.dtype)
    one = gates.dtype.type(1)
    i, f, g, o = part[:n], part[n:2 * n], part[2 * n:3 * n], part[3 * n:]
    for r in range(rows):
        a, by_h, by_cell = gates[4 * n * r:4 * n * (r + 1)], dh[n * r:n * (r + 1)], dc[n * r:n * (r + 1)]
        old = before[n * r:n * (r + 1)]
        part[:] = a
        apply_tanh(now[n * r:n * (r + 1)], t)
        for j in range(n):
            by_c[j] = fma(by_h[j] * o[j], one - t[j] * t[j], by_cell[j])
        for j in range(n):
            by_cell[j] = by_c[j] * f[j]
        for j in range(n):
            a[j] = by_c[j] * g[j] * (i[j] * (one - i[j]))
        to = a[n:2 * n]
        for j in range(n):
            to[j] = by_c[j] * old[j] * (f[j] * (one - f[j]))
        to = a[2 * n:3 * n]
        for j in range(n):
            to[j] = by_c[j] * i[j] * (one - g[j] * g[j])
        to = a[3 * n:]
        for j in range(n):
            to[j] = by_h[j] * t[j] * (o[j] * (one - o[j]))


@loop("X!:3rn X:3rn X!:rn X!:rn ir in")
def _gru_gates(gates: Any, state: Any, inner: Any, h: Any, rows: int, n: int) -> None:
    part = np.empty(3 * n, gates.dtype)
    for r in range(rows):
        a, s = gates[3 * n * r:3 * n * (r + 1)], state[3 * n * r:3 * n * (r + 1)]
        kept, old, new, rest = inner[n * r:n * (r + 1)], h[n * r:n * (r + 1)], a[2 * n:], part[2 * n:]
        add(a[:2 * n], s[:2 * n], part[:2 * n])
        apply_sigmoid(part[:2 * n], a[:2 * n])
        kept[:] = s[2 * n:]
        for j in range(n):
            rest[j] = fma(a[j], kept[j], new[j])
        apply_tanh(rest, new)
        z = a[n:2 * n]
        for j in range(n):
            rest[j] = fma(z[j], old[j] - new[j], new[j])
        old[:] = rest


@loop("X!:3rn X!:3rn X!:rn X:rn X:rn ir in")
def _gru_gates_back(gates: Any, states: Any, dh: Any, inner: Any, before: Any, rows: int, n: int) -> None:
    part, by_n = np.empty(3 * n, gates.dtype), np.empty(n, gates.dtype)
    one = gates.dtype.type(1)
    reset, z, new = part[:n], part[n:2 * n], part[2 * n:]
    for r in range(rows):
        a, s = gates[3 * n * r:3 * n * (r + 1)], states[3 * n * r:3 * n * (r + 1)]
        d, kept, old = dh[n * r:n * (r + 1)], inner[n * r:n * (r + 1)], before[n * r:n * (r + 1)]
        part[:] = a
        for j in range(n):
            by_n[j] = d[j] * (one - z[j]) * (one - new[j] * new[j])
        for j in range(n):
            a[j] = by_n[j] * kept[j] * (reset[j] * (one - reset[j]))
        to = a[n:2 * n]
        for j in range(n):
            to[j] = d[j] * (old[j] - new[j]) * (z[j] * (one - z[j]))
        a[2 * n:] = by_n
        s[:2 * n] = a[:2 * n]
        to = s[2 * n:]
        for j in range(n):
            to[j] = by_n[j] * reset[j]
        for j in range(n):
            d[j] = d[j] * z[j]


@loop("X!:n X:n X!:n in i")
def _rnn_gates(gates: Any, state: Any, h: Any, n: int, relu: int) -> None:
    add(gates[:n], state[:n], gates[:n])
    if relu:
        zero = h.dtype.type(0)
        for j in range(n):
            h[j] = choose(gates[j] < zero, zero, gates[j])
    else:
        apply_tanh(gates[:n], h[:n])


@loop("X!:n X:n X:n in i")
def _rnn_gates_back(gates: Any, dh: Any, out: Any, n: int, relu: int) -> None:
    zero, one = out.dtype.type(0), out.dtype.type(1)
    if relu:
        for j in range(n):
            gates[j] = choose(out[j] <= zero, zero, dh[j])
    else:
        for j in range(n):
            gates[j] = dh[j] * (one - out[j] * out[j])


def lstm(gates: Array, h: Array, c: Array, out: Array, cells: Array, raw: Array | None, weight: Array, projection: Array | None,
         sizes: Array, memory: Array, steps: int, n: int, p: int, reverse: int) -> None:
    state = np.empty((len(h), 4 * n), gates.dtype)
    for first, count, _, _ in walk(sizes, bool(reverse)):
        rows = slice(first, first + count)
        np.matmul(h[:count], weight.T, out=state[:count])
        _lstm_gates(gates[rows], state[:count], c[:count], cells[rows], (out if raw is None else raw)[rows], count, n)
        if raw is not None and projection is not None:
            np.matmul(raw[rows], projection.T, out=out[rows])
        h[:count] = out[rows]


def lstm_gradients(gates: Array, dout: Array, dh: Array, dc: Array, c: Array, cells: Array, projected: Array | None,
                   weight: Array, projection: Array | None, sizes: Array, memory: Array, steps: int, n: int, p: int,
                   reverse: int) -> None:
    for first, count, *before in backwards(sizes, bool(reverse)):
        rows, by_h = slice(first, first + count), dh[:count]
        by_h += dout[rows]
        if projected is not None and projection is not None:
            projected[rows] = by_h
            by_h = by_h @ projection
        _lstm_gates_back(gates[rows], by_h, dc[:count], cells[rows], before_in_time(cells, c, count, *before), count, n)
        np.matmul(gates[rows], weight, out=dh[:count])


def gru(gates: Array, h: Array, out: Array, inner: Array, weight: Array, bias: Array | None, sizes: Array, memory: Array,
        steps: int, n: int, reverse: int) -> None:
    state = np.empty((len(h), 3 * n), gates.dtype)
    for first, count, _, _ in walk(sizes, bool(reverse)):
        rows = slice(first, first + count)
        np.matmul(h[:count], weight.T, out=state[:count])
        if bias is not None:
            state[:count] += bias.reshape(-1)
        _gru_gates(gates[rows], state[:count], inner[rows], h[:count], count, n)
        out[rows] = h[:count]


def gru_gradients(gates: Array, states: Array, dout: Array, dh: Array, h: Array, out: Array, inner: Array, weight: Array,
                  sizes: Array, memory: Array, steps: int, n: int, reverse: int) -> None:
    for first, count, *before in backwards(sizes, bool(reverse)):
        rows, by_h = slice(first, first + count), dh[:count]
        by_h += dout[rows]
        _gru_gates_back(gates[rows], states[rows], by_h, inner[rows], before_in_time(out, h, count, *before), count, n)
        by_h += states[rows] @ weight


def rnn(gates: Array, h: Array, out: Array, weight: Array, sizes: Array, memory: Array, steps: int, n: int, reverse: int,
        relu: int) -> None:
    for first, count, _, _ in walk(sizes, bool(reverse)):
        rows = slice(first, first + count)
        _rnn_gates(gates[rows], h[:count] @ weight.T, out[rows], count * n, relu)
        h[:count] = out[rows]


def rnn_gradients(gates: Array, dout: Array, dh: Array, out: Array, weight: Array, sizes: Array, memory: Array, steps: int,
                  n: int, reverse: int, relu: int) -> None:
    for first, count, _, _ in backwards(sizes, bool(reverse)):
        rows = slice(first, first + count)
        _rnn_gates_back(gates[rows], dh[:count] + dout[rows], out[rows], count * n, relu)
        np.matmul(gates[rows], weight, out=dh[:count])
