"""Softmax and cross-entropy, row by row of a matrix (R, C), each read while in the cache; rows added where an index says."""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Function, Kernel
from mpitrain.kernels.library import CFunction, host, same_shape


def _softmax(x: Array) -> Array:
    xp = array_module(x)
    result = x - x.max(axis=1, keepdims=True)
    xp.exp(result, out=result)
    result /= result.sum(axis=1, keepdims=True)
    return result


def _softmax_grad(result: Array, grad: Array) -> Array:
    return (grad - (grad * result).sum(axis=1, keepdims=True)) * result


def _log_softmax(x: Array) -> Array:
    xp = array_module(x)
    shifted = x - x.max(axis=1, keepdims=True)
    shifted -= xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _log_softmax_grad(result: Array, grad: Array) -> Array:
    return grad - array_module(result).exp(result) * grad.sum(axis=1, keepdims=True)


def _cross_entropy(logits: Array, labels: Array, smoothing: float, ignore: int | None,
                   training: bool) -> tuple[Array, Array, Array]:
    xp = array_module(logits)
    shifted = logits - logits.max(axis=1)[:, None]
    exps = xp.exp(shifted)
    totals = exps.sum(axis=1)
    counted = _counted(labels, ignore, logits.shape[1])
    losses = xp.log(totals) - (1 - smoothing) * shifted[xp.arange(len(labels)), _places(labels, counted, logits.shape[1])]
    if smoothing:
        losses -= smoothing * shifted.mean(axis=1)
    losses = xp.where(counted, losses, losses.dtype.type(0))
    if xp is not np:
        losses = xp.where(counted & ((labels < 0) | (labels >= logits.shape[1])), losses.dtype.type(float("nan")), losses)
    return losses, exps if training else exps[:0], totals if training else totals[:0]


def _cross_entropy_grad(exps: Array, labels: Array, totals: Array, smoothing: float, ignore: int | None, grad: Array,
                        own: bool = True) -> Array:
    xp = array_module(exps)
    exps = exps if own else exps.copy()
    exps *= (grad / totals)[:, None]
    if smoothing:
        exps -= smoothing / exps.shape[1] * grad
    counted = _counted(labels, ignore, exps.shape[1])
    exps[xp.arange(len(labels)), _places(labels, counted, exps.shape[1])] -= (1 - smoothing) * grad
    xp.copyto(exps, exps.dtype.type(0), where=~counted[:, None])
    return exps


def _counted(labels: Array, ignore: int | None, classes: int) -> Array:
    counted: Array = array_module(labels).ones(labels.shape, dtype=bool) if ignore is None else labels != ignore
    _within("cross_entropy", labels[counted] if array_module(labels) is np else labels, classes)
    return counted


def _places(labels: Array, counted: Array, classes: int) -> Array:
    """The labels, 0 where they do not count; a device has not been asked whether they lie within."""
    xp = array_module(labels)
    places: Array = xp.where(counted, labels, 0)
    return places if xp is np else xp.clip(places, 0, classes - 1)


def _within(name: str, indices: Array, count: int) -> None:
    """NumPy would count an index below 0 from the end. (A GPU is not asked: the answer would be waited for.)"""
    if array_module(indices) is np and indices.size and not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(f"{name}: an index lies outside of what it counts")


@host("rows", "cross_entropy", "X:rn L:r X!:r X?!:rn X?!:r d i i ir in", answers=True)
def _cross_entropy_host(call: CFunction, logits: Array, labels: Array, smoothing: float, ignore: int | None,
                        training: bool) -> tuple[Array, Array, Array]:
    logits = np.ascontiguousarray(logits)
    losses = np.empty(len(logits), logits.dtype)
    kept = len(logits) if training else 0
    exps, totals = np.empty((kept, logits.shape[1]), logits.dtype), np.empty(kept, logits.dtype)
    kept_arrays = (exps, totals) if training else (None, None)
    call(logits, labels, losses, *kept_arrays, smoothing, *_ignored(ignore), *logits.shape)
    return losses, exps, totals


@host("rows", "cross_entropy_grad", "X!:rn L:r X:r d d i i ir in", answers=True)
def _cross_entropy_grad_host(call: CFunction, exps: Array, labels: Array, totals: Array, smoothing: float, ignore: int | None,
                             grad: Array, own: bool = True) -> Array:
    exps = exps if own else exps.copy()
    call(exps, labels, totals, smoothing, float(grad), *_ignored(ignore), *exps.shape)
    return exps


def _ignored(ignore: int | None) -> tuple[int, int]:
    return (0, 0) if ignore is None else (1, ignore)


MATRIX, TWO = "X:rn X!:rn ir in", "X:rn X:rn X!:rn ir in"        # one matrix and the result, and two


def _of_rows(name: str, reference: Function, signature: str) -> Kernel:
    version = host("rows", name, signature)(same_shape)
    return Kernel(name, reference, version, version.loop("rows"))


softmax = _of_rows("softmax", _softmax, MATRIX)
softmax_grad = _of_rows("softmax_grad", _softmax_grad, TWO)
log_softmax = _of_rows("log_softmax", _log_softmax, MATRIX)
log_softmax_grad = _of_rows("log_softmax_grad", _log_softmax_grad, TWO)

cross_entropy = Kernel("cross_entropy", _cross_entropy, _cross_entropy_host, _cross_entropy_host.loop("rows"))
"""(losses (R,), exponentials (R, C), totals (R,)) of (logits, labels (R,) int64, smoothing, label to ignore or None, training).

The exponentials, of logits less the largest of their row, and their sums are for the gradient: undefined in rows that are
ignored, and empty where not `training`. A device keeps the logits themselves instead, and for the totals (2, R): the largest
logits and the sums; `exponentials` makes the same of both. Its losses and totals are float32 for 16-bit logits, and the loss of a
label out of range is NaN there, where the host raises IndexError.
"""

cross_entropy_grad = Kernel("cross_entropy_grad", _cross_entropy_grad, _cross_entropy_grad_host,
                            _cross_entropy_grad_host.loop("rows"))
"""The gradient times `grad` (a 0-d array), of (exps, labels, totals, smoothing, ignore, grad, own=True), with what
`cross_entropy` kept: in the memory of exps (on a device, of logits) where that is the caller's `own`, else in new memory."""


def exponentials(kept: Array, totals: Array) -> tuple[Array, Array]:
    """(exponentials (R, C), totals (R,)) of what `cross_entropy` kept: of logits in new memory, else what they are."""
    if totals.ndim == 1:
        return kept, totals
    exps = array_module(kept).exp(kept - totals[0][:, None])
    return exps.astype(kept.dtype, copy=False), totals[1]


def _scatter(out: Array, indices: Array, values: Array) -> Array:
    _within("scatter_add_rows", indices, len(out))
    array_module(out).add.at(out, indices, values)
    return out


@host("rows", "scatter_add_rows", "X!:vd L:r X:rd ir id iv", answers=True)
def _scatter_host(call: CFunction, out: Array, indices: Array, values: Array) -> Array:
    assert values.shape == (indices.size, out.shape[1]) and values.dtype == out.dtype
    if not out.flags.c_contiguous:
        return _scatter(out, indices, values)
    call(out, np.ascontiguousarray(indices, dtype=np.int64), np.ascontiguousarray(values), *values.shape, len(out))
    return out


scatter_add_rows = Kernel("scatter_add_rows", _scatter, _scatter_host, _scatter_host.loop("rows"))
"""Adds row i of `values` (N, D) to row indices[i] of `out` (V, D), in place and in order of i; returns `out`.

A device takes 16-bit values with an `out` of float32, too. The bits are the host's there where no index comes more than 128
times; the rows of one that does are added up in groups of 128, and these in order. It passes over indices out of range.
"""


def _take_rows(table: Array, indices: Array) -> Array:
    return array_module(table).take(table, indices, axis=0)


take_rows = Kernel("take_rows", _take_rows)
"""Rows `indices` (...) of `table` (V, D): (..., D). On a device the row of an index out of range is NaN, where the host raises
IndexError, but for below 0.
"""
