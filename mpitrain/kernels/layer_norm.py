"""The loops of layer and RMS norm, by row of x (R, D). What belongs to a row is a 1-D array."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.dropout import Dropping, dropout, dropout_grad
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, host, misfit, packed

Normed = tuple[Array, Array, Array, Array, Array | None]
Gradients = tuple[Array | None, Array | None, Array | None, Array | None]


def _row_norm(x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float, centred: bool,
              dropping: Dropping | None = None) -> Normed:
    xp = array_module(x)
    total, bits = x, None
    if added is not None and dropping is not None:
        samples = len(dropping.rows), x.size // max(len(dropping.rows), 1)
        total, bits = dropout.reference(added.reshape(samples), dropping.rows, dropping.key, dropping.p, x.reshape(samples),
                                         dropping.first(samples[1]))
        total = total.reshape(x.shape)
    elif added is not None:
        total = x + added
    means = total.mean(axis=1) if centred else xp.zeros(len(x), x.dtype)
    y = total - means[:, None]
    if centred:                                                # A row of equal numbers becomes 0, not the mean's rounding error.
        drift = y.mean(axis=1)
        y -= drift[:, None]
        means = means + drift
    variances = (y * y).mean(axis=1)
    if centred:                                                # A row too large for its squares is NaN, as in C.
        xp.copyto(variances, variances.dtype.type(xp.nan), where=xp.isinf(variances))
    inverses = 1 / xp.sqrt(variances + x.dtype.type(eps))
    y *= inverses[:, None]
    y *= weight
    if bias is not None:
        y += bias
    return y, total, means, inverses, bits


def _row_norm_gradients(grad: Array, x: Array, weight: Array, around: Array | None, means: Array, inverses: Array,
                        centred: bool, wanted: tuple[bool, bool], bits: Array | None = None, p: float = 0.0) -> Gradients:
    z = (x - means[:, None]) * inverses[:, None]
    dx = dropped = None
    if wanted[0]:
        dx = grad * weight
        slope = (dx * z).mean(axis=1, keepdims=True)
        if centred:
            dx -= dx.mean(axis=1, keepdims=True)
        dx -= z * slope
        dx *= inverses[:, None]
        if around is not None:
            dx += around
        if bits is not None:
            dropped = dropout_grad.reference(dx.reshape(len(bits), dx.size // len(bits)), bits, p).reshape(dx.shape)
    if not wanted[1]:
        return dx, None, None, dropped
    product, plain = (terms.sum(axis=0, dtype="float64").astype(x.dtype) for terms in (grad * z, grad))
    return dx, product, plain, dropped


@host("layer_norm", "row_norm",
      "X:rn X?:rn X?!:rn X:n X?:n X!:rn X!:r X!:r d ir in i L?:2r/p B?!:rn/8 i i ip d")
def _row_norm_host(function: CFunction, x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float,
                   centred: bool, dropping: Dropping | None = None) -> Normed:
    x, y, (means, inverses) = np.ascontiguousarray(x), np.empty(x.shape, x.dtype), np.empty((2, len(x)), x.dtype)
    total = x if added is None else np.empty(x.shape, x.dtype)
    drops: tuple[Any, ...] = (None, None, 0, 0, 1, 0.0)
    if dropping is not None and added is not None:
        if x.shape[1] % 8:
            misfit("row_norm with dropout, in parts of 8", x)
        samples = max(len(dropping.rows), 1)
        rows, key, least = dropping.for_c(x.size // samples)
        bits = np.empty((len(dropping.rows), x.size // (8 * samples)), np.uint8)
        drops = rows, bits, key, least, len(x) // samples, dropping.scale
    function(x, packed(added), None if added is None else total, packed(weight), packed(bias), y, means, inverses, eps,
             *x.shape, centred, *drops)
    return y, total, means, inverses, drops[1]


_scratch = Scratch()


@host("layer_norm", "row_norm_gradients",
      "X:rn X:rn X:n X?:rn X:r X:r X?!:rn X?!:n X?!:n M!:16n M!:16n ir in i B?:rn/8 X?!:rn d")
def _row_norm_gradients_host(function: CFunction, grad: Array, x: Array, weight: Array, around: Array | None, means: Array,
                             inverses: Array, centred: bool, wanted: tuple[bool, bool], bits: Array | None = None,
                             p: float = 0.0) -> Gradients:
    dtype, d = x.dtype, x.shape[1]
    if bits is not None and d % 8:
        misfit("row_norm_gradients with dropout, in parts of 8", x)
    dx = np.empty(x.shape, dtype) if wanted[0] else None
    product, plain = (np.empty(d, dtype), np.empty(d, dtype)) if wanted[1] else (None, None)
    dropped = np.empty(x.shape, dtype) if bits is not None and wanted[0] else None
    room = _scratch.room(32 * d)
    function(np.ascontiguousarray(grad), np.ascontiguousarray(x), packed(weight), packed(around), means, inverses, dx,
             product, plain, room, room[16 * d:], *x.shape, centred, None if dropped is None else bits, dropped, 1 / (1 - p))
    return dx, product, plain, dropped


row_norm = Kernel("row_norm", _row_norm, _row_norm_host, _row_norm_host.loop("layer_norm"))
"""(y, x + added, means, inverse deviations, bits) from (x, added or None, weight, bias or None, eps, centred, a `Dropping` of
parts of `added`, or None): y is the second, normalised; it is x where nothing is added. RMS norm is not centred.

Where something is dropped, D is a multiple of 8, and R one of the rows of the dropping, which are samples. `bits`
(B, R D / B / 8) uint8 say what was kept, else they are None.
"""

row_norm_gradients = Kernel("row_norm_gradients", _row_norm_gradients, _row_norm_gradients_host,
                            _row_norm_gradients_host.loop("layer_norm"))
"""(gradient of x, sums over rows of grad * normalised x, and of grad, (D,), made in float64, gradient of what was added) from
(grad, x, weight, what is added to the first or None, means, inverse deviations, centred, (whether the first is wanted, whether
the sums are), bits of dropout or None, its p); None for what is not wanted, the last also where nothing was dropped: it is the
first."""
