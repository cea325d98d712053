"""Products with weights in few bits: y (M, N) = x (M, K) w' times scales + bias. native/lowbit.c has formats and order of sums.

`int8` and `int4` take x as floats; sums of floats, so the array expression is only close to C. `rows` makes whole numbers of x,
and `int8_integers` and `int4_integers` multiply those: C's, Numba's and NumPy's have equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, misfit

GROUP, HALF, LANES = 32, 16, 16
VECTOR = 64                      # numbers of a row of x that int8's kernel reads at a time
SPAN = 128                       # numbers of a row of x that int4's kernel reads at a time
TINY = 2.0 ** -100               # rows without a larger number count as zeros


def padded_to(k: int, unit: int) -> int:
    return -(-k // unit) * unit


def unpacked(w: Array) -> Array:
    """int8 (N, G, 32) of the nibbles (N, G, 16)."""
    xp = array_module(w)
    return xp.concatenate([w & 15, w >> 4], axis=-1).astype(xp.int8) - xp.int8(8)


def _with_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias


def _int8(x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    if x.shape[1] != w.shape[1] or len(w) != len(scale):
        misfit("int8", x, w, scale)
    return _with_bias(array_module(x).matmul(x, w.T.astype(x.dtype)) * scale.astype(x.dtype), bias)


def _int4(x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    if w.shape[:2] != scale.shape or w.shape[1] != -(-x.shape[1] // GROUP):
        misfit("int4", x, w, scale)
    whole = (unpacked(w).astype(x.dtype) * scale.astype(x.dtype)[..., None]).reshape(len(w), w.shape[1] * GROUP)
    return _with_bias(array_module(x).matmul(x, whole[:, :x.shape[1]].T), bias)


@host("lowbit", "lowbit_int8", "F:mk B:nk F:n F?:n F!:mn im in ik")
def _int8_host(call: CFunction, x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    if not _suits(x):
        return _int8(x, w, scale, bias)
    y = np.empty((len(x), len(w)), np.float32)
    call(np.ascontiguousarray(x), w.view(np.uint8), scale, bias, y, *y.shape, x.shape[1])
    return y


@host("lowbit", "lowbit_int4", "F:mk B:ng16 H:ng F?:n F!:mn im in ik ig")
def _int4_host(call: CFunction, x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    if not _suits(x):
        return _int4(x, w, scale, bias)
    if w.shape[1] != -(-x.shape[1] // GROUP):
        misfit("int4", x, w, scale)
    y = np.empty((len(x), len(w)), np.float32)
    call(np.ascontiguousarray(x), w, scale.view(np.uint16), bias, y, *y.shape, x.shape[1], w.shape[1])
    return y


def _suits(x: Array) -> bool:
    return x.dtype == np.float32 and x.dtype.isnative


def _rows(x: Array, unit: int, given: float) -> tuple[Array, Array, Array]:
    xp, (m, k) = array_module(x), x.shape
    size = xp.abs(x).max(axis=1, initial=0).astype(np.float32) if k else xp.zeros(m, np.float32)
    finite = xp.isfinite(size)
    size = xp.where(finite, size, np.float32(0))
    scale = size / np.float32(127) if given < 0 else xp.full(m, np.float32(given))
    zeros = size < np.float32(TINY) if given < 0 else scale < np.float32(TINY)
    divisor = xp.where(zeros, np.float32(1), size if given < 0 else scale)
    inverse = xp.where(zeros | ~finite, np.float32(0), np.float32(127 if given < 0 else 1) / divisor)
    q = xp.zeros((m, padded_to(k, unit)), np.int8)
    with np.errstate(over="ignore"):              # beyond the given range
        q[:, :k] = xp.rint(xp.clip(xp.where(finite[:, None], x, 0) * inverse[:, None], -127, 127)).astype(np.int8)
    scales = xp.where(finite, xp.where(zeros, np.float32(0), scale), np.float32(np.nan)).astype(np.float32)
    return q, scales, q.sum(axis=1, dtype=np.int32)


@host("lowbit", "lowbit_rows", "F:mk B!:mp F!:m I!:m im ik ip d")
def _rows_host(call: CFunction, x: Array, unit: int, given: float) -> tuple[Array, Array, Array]:
    if not _suits(x):
        return _rows(x.astype(np.float32), unit, given)
    if type(unit) is not int or unit < 1:
        misfit(f"lowbit_rows in units of {unit!r:.20}", x)
    (m, k), p = x.shape, padded_to(x.shape[1], unit)
    q, scales, sums = np.empty((m, p), np.int8), np.empty(m, np.float32), np.empty(m, np.int32)
    call(np.ascontiguousarray(x), q.view(np.uint8), scales, sums, m, k, p, given)
    return q, scales, sums


def _int8_integers(q: Array, of_x: Array, sums: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    if q.shape[1] != padded_to(w.shape[1], VECTOR):
        misfit("int8_integers", q, w)
    exact = array_module(q).matmul(q[:, :w.shape[1]].astype(np.float64), w.T.astype(np.float64))     # whole numbers below 2^53
    return _with_bias(exact.astype(np.float32) * (of_x[:, None] * scale), bias)


@host("lowbit", "lowbit_int8_integers", "B:mp F:m I:m B:nk F:n F?:n F!:mn im in ik ip")
def _int8_integers_host(call: CFunction, q: Array, of_x: Array, sums: Array, w: Array, scale: Array, bias: Array | None
                        ) -> Array:
    y = np.empty((len(q), len(w)), np.float32)
    if q.shape[1] != padded_to(w.shape[1], VECTOR):
        misfit("int8_integers", q, w)
    call(q.view(np.uint8), of_x, sums, w.view(np.uint8), scale, bias, y, *y.shape, w.shape[1], q.shape[1])
    return y


def _int4_integers(q: Array, of_x: Array, sums: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    xp, (n, groups, _) = array_module(q), w.shape
    if q.shape[1] != padded_to(groups * GROUP, SPAN):
        misfit("int4_integers", q, w)
    m, spans = len(q), q.shape[1] // SPAN
    of_w = xp.zeros((n, spans * 4, GROUP), np.float64)
    of_w[:, :groups] = unpacked(w)
    scales = xp.zeros((n, spans * 4), np.float32)
    scales[:, :groups] = scale

    def by_lanes(a: Array, rows: int) -> Array:             # (span, lane, rows, 8): half, then four neighbours
        return a.reshape(rows, spans, 4, 2, 4, 4).transpose(1, 2, 4, 0, 3, 5).reshape(spans, LANES, rows, 8)
    left, right = by_lanes(q.astype(np.float64), m), by_lanes(of_w, n)
    sums = xp.zeros((LANES, m, n), np.float32)
    for s in range(spans):
        exact = xp.matmul(left[s], right[s].swapaxes(1, 2)).astype(np.float32)
        sums += exact * xp.repeat(scales[:, 4 * s:4 * s + 4].T, 4, axis=0)[:, None, :]
    half = sums[:8] + sums[8:]
    quarter = half[:4] + half[4:]
    return _with_bias(((quarter[0] + quarter[1]) + (quarter[2] + quarter[3])) * of_x[:, None], bias)


@host("lowbit", "lowbit_int4_integers", "B:mp F:m B:ng16 H:ng F?:n F!:mn im in ik ig ip")
def _int4_integers_host(call: CFunction, q: Array, of_x: Array, sums: Array, w: Array, scale: Array, bias: Array | None
                        ) -> Array:
    n, groups, _ = w.shape
    if q.shape[1] != padded_to(groups * GROUP, SPAN):
        misfit("int4_integers", q, w)
    y = np.empty((len(q), n), np.float32)
    call(q.view(np.uint8), of_x, w, scale.view(np.uint16), bias, y, *y.shape, groups * GROUP, groups, q.shape[1])
    return y


int8: Any = Kernel("lowbit_int8", _int8, host=_int8_host)
"""y from (x, w int8 (N, K), scale (N,), bias or None)."""

int4: Any = Kernel("lowbit_int4", _int4, host=_int4_host)
"""y from (x, w uint8 (N, G, 16), scale float16 (N, G), bias or None)."""

rows: Any = Kernel("lowbit_rows", _rows, host=_rows_host, numba=_rows_host.loop("lowbit"))
"""(int8 (M, K padded with zeros to whole `unit`s), the scale and the sum of each row) from (x, unit, the scale of all rows or -1:
of each, its largest size / 127). A row that is not finite has the scale NaN."""

int8_integers: Any = Kernel("lowbit_int8_integers", _int8_integers, host=_int8_integers_host,
                            numba=_int8_integers_host.loop("lowbit"))
"""y from (x int8 (M, K padded to whole vectors), scales and sums of its rows, w int8 (N, K), scale (N,), bias or None); K is 2^16
at most."""

int4_integers: Any = Kernel("lowbit_int4_integers", _int4_integers, host=_int4_integers_host,
                            numba=_int4_integers_host.loop("lowbit"))
"""y from (x int8 (M, K padded to whole spans), scales and sums of its rows, w uint8 (N, G, 16), scale float16 (N, G), bias or
None)."""
