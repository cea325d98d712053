"""Activations on a device; see kernels/pointwise.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, computed, contiguous, over
from mpitrain.kernels.device.sums import MOST_Y, sum_partials

SOURCE, WIDE, ROWS, AT_ONCE = Source("pointwise"), 256, 64, 8         # columns.h's WIDE and ROWS_A_BLOCK; numbers of a thread


def _values(name: str, kernel: str = "") -> None:
    run = SOURCE.function(kernel or name, "X:n X!:n in")

    @device(name)
    def values(x: Array, out: Array | None = None) -> Array:
        x = contiguous(x)
        result = array_module(x).empty(x.shape, x.dtype) if out is None else out
        run(over(-(-x.size // AT_ONCE)), WIDE, x, result, x.size)
        return result


def _and_slope(name: str) -> None:
    run = SOURCE.function(name, "X:n X!:n X!:n in")

    @device(name)
    def values(x: Array, slope: Array) -> Array:
        x = contiguous(x)
        result = array_module(x).empty(x.shape, x.dtype)
        run(over(-(-x.size // AT_ONCE)), WIDE, x, slope, result, x.size)
        return result


def _gradient(name: str, in_place: bool = False) -> None:
    run: DeviceFunction = SOURCE.function(name, "X:rn X:rn X!:rn S?!:bn ir in ib")

    @device(name)
    def gradient(kept: Array, grad: Array, sums: Array | None) -> Array:
        xp, kept, grad = array_module(kept), contiguous(kept), contiguous(grad)
        result = kept if in_place else xp.empty(kept.shape, kept.dtype)
        if sums is None:
            run(over(-(-kept.size // AT_ONCE)), WIDE, kept, grad, result, None, 1, kept.size, 0)
            return result
        rows, columns = kept.shape
        blocks = -(-rows // ROWS)
        partial = xp.empty((blocks, columns), computed(kept.dtype))
        run((-(-columns // WIDE), min(blocks, MOST_Y)), WIDE, kept, grad, result, partial, rows, columns, blocks)
        sum_partials(partial, sums)
        return result


for _name in ("relu", "sigmoid", "gelu", "gelu_tanh", "silu"):
    _values(_name)
_values("tanh", "tanh_of")
for _name in ("gelu_and_slope", "gelu_tanh_and_slope", "silu_and_slope"):
    _and_slope(_name)
for _name in ("relu_grad", "tanh_grad", "sigmoid_grad"):
    _gradient(_name)
_gradient("slope_grad", in_place=True)
