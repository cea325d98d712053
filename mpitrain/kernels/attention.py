"""Softmax of attention scores (..., L, S), scaled and causal, and its gradient, in place where that is wanted."""

from __future__ import annotations

from math import prod

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host


def _weights(scores: Array, scale: float, causal: bool, out: Array | None = None) -> Array:
    xp = array_module(scores)
    result = xp.multiply(scores, scores.dtype.type(scale), out=out)
    if causal:
        xp.copyto(result, result.dtype.type(-float("inf")), where=~xp.tri(*scores.shape[-2:], dtype=bool))
    top = result.max(axis=-1, keepdims=True)
    result -= xp.where(top == -float("inf"), top.dtype.type(0), top)      # a row without any score becomes zeros
    xp.exp(result, out=result)
    total = result.sum(axis=-1, keepdims=True)
    result /= xp.where(total == 0, total.dtype.type(1), total)
    return result


def _weights_gradient(weights: Array, grad: Array, scale: float, causal: bool, out: Array | None = None) -> Array:
    mean = (weights * grad).sum(axis=-1, keepdims=True)
    result = array_module(weights).subtract(grad, mean, out=out)
    result *= weights
    result *= weights.dtype.type(scale)
    return result


@host("attention", "weights", "X:mrc X!:mrc d im ir ic i")
def _weights_host(function: CFunction, scores: Array, scale: float, causal: bool, out: Array | None = None) -> Array:
    result = np.empty(scores.shape, scores.dtype) if out is None else out
    function(np.ascontiguousarray(scores), result, scale, prod(scores.shape[:-2]), *scores.shape[-2:], causal)
    return result


@host("attention", "weights_gradient", "X:mrc X:mrc X!:mrc d im ir ic i")
def _weights_gradient_host(function: CFunction, weights: Array, grad: Array, scale: float, causal: bool,
                           out: Array | None = None) -> Array:
    result = np.empty(grad.shape, grad.dtype) if out is None else out
    function(weights, np.ascontiguousarray(grad), result, scale, prod(grad.shape[:-2]), *grad.shape[-2:], causal)
    return result


attention_weights = Kernel("attention_weights", _weights, _weights_host, _weights_host.loop("attention"))
"""softmax(scale * scores), over columns 0..i in row i where causal, from (scores, scale, causal, out=None)."""

attention_weights_gradient = Kernel("attention_weights_gradient", _weights_gradient, _weights_gradient_host,
                                    _weights_gradient_host.loop("attention"))
"""The gradient of the scores from (weights, gradient of the weights, scale, causal, out=None)."""
