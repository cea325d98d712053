"""Dropout on a device, with the host's masks; see kernels/dropout.py."""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, contiguous, over
from mpitrain.kernels.device.random import key_of
from mpitrain.kernels.dropout import WORDS

SOURCE, WIDE = Source("dropout"), 256                                 # dropout.cu's WIDE
_dropout = SOURCE.function("dropout", "X:hw L:h L?:h X?:hw X!:hw B!:w/8h L?:1 i i i d ih iw")
_dropout_grad = SOURCE.function("dropout_grad", "X:hw B:w/8h X!:hw d ih iw")


@device("dropout")
def dropout(x: Array, rows: Array, key: Any, p: float, added: Array | None, first: Any = 0) -> tuple[Array, Array]:
    xp, x = array_module(x), contiguous(x)
    height, width = x.shape
    y, bits = xp.empty(x.shape, x.dtype), xp.empty((height, (width + 7) // 8), xp.uint8)
    if x.size:
        firsts, first = (None, first) if isinstance(first, int) else (contiguous(first), 0)
        _dropout(over(bits.size), WIDE, x, contiguous(rows), firsts, contiguous(added), y, bits, *key_of(key), round(p * WORDS),
                 first, 1 / (1 - p), height, width)
    return y, bits


@device("dropout_grad")
def dropout_grad(grad: Array, bits: Array, p: float) -> Array:
    grad = contiguous(grad)
    result = array_module(grad).empty(grad.shape, grad.dtype)
    if grad.size:
        _dropout_grad(over(bits.size), WIDE, grad, contiguous(bits), result, 1 / (1 - p), *grad.shape)
    return result
