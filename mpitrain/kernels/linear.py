"""A linear layer y = f(x w' + bias) and its gradients, each in one call of C where products are ours: see kernels/product.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.native import load
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import LINE, CFunction, Scratch, bind, host
from mpitrain.kernels.pointwise import ACTIVATIONS, Activation
from mpitrain.kernels.product import KINDS, LEAST_COLUMNS, LEAST_ROWS, LEAST_WORK, is_fast, on_device, one_thread, work_bytes
from mpitrain.kernels.sums import EXACT, sum_rows

LEAST = max(LEAST_ROWS, LEAST_COLUMNS)
IN_C = {activation.number: activation for activation in ACTIVATIONS.values() if activation.number}     # native/linear.h's tables


def suits(x: Array, weight: Array, activation: Activation | None, operands: str) -> bool:
    """Whether all three products of a layer are ours at the shapes of x (M, K) and weight (N, K), and the activation is in C; on
    a device, whether it has products of them."""
    if type(x) is not np.ndarray and operands in ("", "tf32") and on_device(x, weight):
        return x.size > 0 and weight.size > 0 and x.dtype == weight.dtype
    rows, inputs = x.shape
    outputs = len(weight)
    return (operands == "" and rows >= LEAST and inputs >= LEAST and outputs >= LEAST and rows * inputs * outputs >= LEAST_WORK
            and type(x) is np.ndarray and type(weight) is np.ndarray and x.dtype in KINDS and x.dtype == weight.dtype
            and x.flags.carray and weight.flags.c_contiguous and weight.flags.aligned
            and (activation is None or activation.number > 0) and one_thread() and is_fast())


def _linear(x: Array, weight: Array, bias: Array | None, activation: Activation | None, training: bool
            ) -> tuple[Array, Array | None]:
    made = array_module(x).matmul(x, weight.T)
    if bias is not None:
        made += bias
    return (made, None) if activation is None else activation.forward(made, ours=True, training=training)


@host("product", "linear", "X:mk X:nk X?:n X!:mn X?!:mn M! im in ik i")
def _linear_host(call: CFunction, x: Array, weight: Array, bias: Array | None, activation: Activation | None, training: bool
                 ) -> tuple[Array, Array | None]:
    if activation is not None and IN_C.get(activation.number) is not activation:
        return _linear(x, weight, bias, activation, training)
    (m, k), n = x.shape, len(weight)
    y, kept = np.empty((m, n), x.dtype), None
    if activation is not None:
        kept = np.empty((m, n), x.dtype) if training and activation.and_slope is not None else y
    call(x, weight, None if bias is None else np.ascontiguousarray(bias, x.dtype), y, None if kept is y else kept,
         _scratch.room(work_bytes()), m, n, k, 0 if activation is None else activation.number)
    return y, kept


def _gradients(grad: Array, kept: Array | None, x: Array, weight: Array, activation: Activation | None, sums: Array | None,
               by_weight: Array | None, wanted: bool) -> tuple[Array, Array | None]:
    xp = array_module(grad)
    if activation is not None:
        grad = activation.gradient(kept, grad, sums)
    elif sums is not None:
        sum_rows(grad, sums)
    if by_weight is not None:
        xp.matmul(grad.T, x, out=by_weight)
    return grad, xp.matmul(grad, weight) if wanted else None


@host("product", "linear_gradients", "X:mn X?:mn X:mk X:nk X:mn X?!:n X?!:mk X?!:nk M! im in ik i")
def _gradients_host(call: CFunction, grad: Array, kept: Array | None, x: Array, weight: Array, activation: Activation | None,
                    sums: Array | None, by_weight: Array | None, wanted: bool) -> tuple[Array, Array | None]:
    if activation is not None and IN_C.get(activation.number) is not activation:
        return _gradients(grad, kept, x, weight, activation, sums, by_weight, wanted)
    made = grad = np.asarray(grad, order="C")
    if activation is not None:
        kept = np.asarray(kept, order="C")
        made = kept if activation.and_slope is not None else np.empty_like(kept)
    by_x = np.empty_like(x) if wanted else None
    apart = sums if len(x) > EXACT else None          # C adds up row after row
    to_bias, to_weight = _memory_for(None if apart is not None else sums, x.dtype), _memory_for(by_weight, x.dtype)
    call(grad, kept, x, weight, made, to_bias, by_x, to_weight, _scratch.room(work_bytes()), len(x), len(weight), x.shape[1],
         0 if activation is None else activation.number)
    if apart is not None:
        sum_rows(made, apart)
    for out, made_there in ((sums, to_bias), (by_weight, to_weight)):
        if out is not None and made_there is not None and out is not made_there:
            out[...] = made_there
    return made, by_x


def _memory_for(out: Array | None, dtype: Any) -> Array | None:
    """The memory that C writes instead of `out`: `out` itself, unless it has another dtype or gaps."""
    return out if out is None or (out.dtype == dtype and out.flags.carray) else np.empty(out.shape, dtype)


def pack(weight: Array) -> Array | None:
    """A weight (N, K) as `packed_layer` takes it, a little more memory than its own; None without a compiler."""
    found = _packing(weight.dtype.name) if weight.dtype in KINDS and weight.flags.c_contiguous else None
    if found is None:
        return None
    numbers, into, _ = found
    made = _on_a_line(numbers(*weight.shape), weight.dtype)
    into(weight, made, *weight.shape)
    return made


def packed_layer(rows: int, shape: tuple[int, ...], packed: Array, bias: Array | None,
                 activation: Activation | None) -> Callable[[Array], Array] | None:
    """`linear` without a gradient, for x (rows, K) and the packed weight of `shape` (N, K), of the same bits; None where C has
    not the activation."""
    found, (n, k), number = _packing(packed.dtype.name), shape, 0 if activation is None else activation.number
    if found is None or activation is not None and IN_C.get(number) is not activation:
        return None
    run, added = found[2], None if bias is None else np.ascontiguousarray(bias, packed.dtype)

    def layer(x: Array) -> Array:
        y = np.empty((rows, n), x.dtype)
        run(x, packed, added, y, _scratch.room(work_bytes()), rows, n, k, number)
        return y
    return layer


@cache
def _packing(dtype: str) -> tuple[Callable[..., int], Callable[..., None], Callable[..., None]] | None:
    """How many numbers a packed weight has, what packs it, and the layer."""
    library, into = load("product"), bind("product", "pack", "X:nk X! in ik")
    run = bind("product", "linear_packed", "X:mk X X?:n X!:mn M! im in ik i")
    if library is None or into is None or run is None:
        return None
    numbers = getattr(library, f"packed_numbers_{dtype}")
    numbers.argtypes, numbers.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return numbers, into, run


def _on_a_line(numbers: int, dtype: Any) -> Array:
    """Memory for so many numbers that begins with a cache line."""
    raw = np.empty(numbers * dtype.itemsize + LINE, np.uint8)
    return raw[-raw.ctypes.data % LINE:][:numbers * dtype.itemsize].view(dtype)


_scratch = Scratch()                            # C packs the blocks of a product here.

linear = Kernel("linear", _linear, host=_linear_host)
"""(y, what the gradient needs of the activation or None) from (x, weight, bias or None, activation or None, whether the gradient
will be wanted); on a device, the format that operands are rounded to may follow."""

linear_gradients = Kernel("linear_gradients", _gradients, host=_gradients_host)
"""(gradient of the product, of x or None) from (grad of y, what was kept, x, weight, activation or None, memory for the gradients
of bias and weight, None where not wanted, whether that of x is). The first is in the memory of what was kept where that is a
derivative, and grad itself without an activation."""
