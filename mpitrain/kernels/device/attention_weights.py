"""Softmax of attention scores on a device; see kernels/attention.py."""

from __future__ import annotations

from math import prod

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, contiguous
from mpitrain.kernels.device.rows import by_rows

SOURCE = Source("attention_weights")
_weights = SOURCE.function("weights", "X:rn X!:rn d ir i in i")
_weights_gradient = SOURCE.function("weights_gradient", "X:rn X:rn X!:rn d ir i in i")


def _made(like: Array, out: Array | None) -> Array:
    """Memory for a result: `out` where that has no gaps."""
    return out if out is not None and out.flags.c_contiguous else array_module(like).empty(like.shape, like.dtype)


def _given(made: Array, out: Array | None) -> Array:
    if out is None or made is out:
        return made
    out[...] = made
    return out


def _sizes(scores: Array) -> tuple[int, int, int]:
    """Rows, rows of a matrix, columns."""
    return prod(scores.shape[:-1]), *scores.shape[-2:]


@device("attention_weights")
def attention_weights(scores: Array, scale: float, causal: bool, out: Array | None = None) -> Array:
    made, (rows, length, columns) = _made(scores, out), _sizes(scores)
    if scores.size:
        _weights(*by_rows(rows, scores.nbytes), contiguous(scores), made, scale, rows, length, columns, causal)
    return _given(made, out)


@device("attention_weights_gradient")
def attention_weights_gradient(weights: Array, grad: Array, scale: float, causal: bool, out: Array | None = None) -> Array:
    made, (rows, length, columns) = _made(grad, out), _sizes(grad)
    if grad.size:
        _weights_gradient(*by_rows(rows, grad.nbytes), contiguous(weights), contiguous(grad), made, scale, rows, length, columns,
                          causal)
    return _given(made, out)
