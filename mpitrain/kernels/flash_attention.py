"""Attention whose weights are not kept: softmax(scale * q k') v and its gradients, block by block in C.

After Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022. Letters: `B` batch,
`H` heads, `L` queries, `S` keys, `D` width of q and k, `E` width of v.

Attention to some keys, and then to others, is put together to what attention to all of them gives: a softmax's largest score
and sum are enough to correct what was made with another's (Milakov and Gimelshein: "Online normalizer calculation for
softmax", 2018).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.native import load
from mpitrain.kernels.blocked_attention import EXPRESSIONS, backward, forward
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.kernel import Function, Kernel
from mpitrain.kernels.library import CFunction, Scratch, host, misfit


def _for_c(dropping: Dropping | None, q: Array, k: Array) -> tuple[Any, ...]:
    if dropping is None:
        return None, 0, 0, 0.0
    return *dropping.for_c(q.shape[1] * q.shape[2] * k.shape[2]), dropping.scale


def run_forward(library: str, call: CFunction, q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool,
                dropping: Dropping | None = None) -> tuple[Array, Array]:
    q, k, v = _along_rows(q), _along_rows(k), _along_rows(v)
    tops, inverses = np.empty((2, *q.shape[:-1]), q.dtype)
    _check("flash_attention", q, k, v, tops, inverses, out=out, dropping=dropping)
    _call(library, call, tops, inverses, (q, k, v, out), scale, causal, dropping)
    return tops, inverses


def run_backward(library: str, call: CFunction, q: Array, k: Array, v: Array, out: Array, grad: Array, tops: Array,
                 inverses: Array, scale: float, causal: bool, dq: Array | None, dk: Array | None, dv: Array | None,
                 dropping: Dropping | None = None) -> None:
    arrays = (_along_rows(q), _along_rows(k), _along_rows(v), out, _along_rows(grad), dq, dk, dv)
    _check("flash_attention_grad", *arrays[:3], tops, inverses, out=out, grad=arrays[4], dq=dq, dk=dk, dv=dv, dropping=dropping)
    _call(library, call, tops, inverses, arrays, scale, causal, dropping)


def _check(name: str, q: Array, k: Array, v: Array, tops: Array, inverses: Array, *, out: Array, grad: Array | None = None,
           dq: Array | None = None, dk: Array | None = None, dv: Array | None = None, dropping: Dropping | None = None) -> None:
    """C is handed the first row of each array and the steps to the others: here it is seen that these are there. Shapes that
    NumPy would broadcast are refused with the others."""
    b, h, length, width = q.shape
    keys, values = k.shape[2], v.shape[3]
    shapes = ((q, q.shape), (k, (b, h, keys, width)), (v, (b, h, keys, values)), (out, (b, h, length, values)),
              (grad, out.shape), (dq, q.shape), (dk, k.shape), (dv, v.shape))
    for x, shape in shapes:
        if x is not None and (x.shape != shape or 0 in shape or not x.flags.aligned
                              or (x.strides[3] != x.itemsize and shape[3] != 1)):
            misfit(f"{name}, rows without gaps", q, k, v, out, grad)
    if tops.shape != q.shape[:3] or inverses.shape != q.shape[:3] or (dropping is not None and len(dropping.rows) != b):
        misfit(name, q, tops, inverses)


def _call(library: str, call: CFunction, tops: Array, inverses: Array, arrays: tuple[Any, ...], scale: float, causal: bool,
          dropping: Dropping | None) -> None:
    q, k, v = arrays[:3]
    memory = _scratch.room(_work_bytes(library, q.shape[3], v.shape[3], v.shape[2], v.itemsize))
    begins = [None if x is None else x[0, 0, 0] for x in arrays]          # C gets their addresses, and the steps from there
    call(tops, inverses, *begins, _shape(q, k, v, causal, arrays, dropping), scale, memory,
         *_for_c(dropping, q, k))


_scratch = Scratch()


@lru_cache(1024)
def _work_bytes(name: str, width: int, values: int, keys: int, itemsize: int) -> int:
    library = load(name)
    assert library is not None, "its functions are called"
    bytes_for = getattr(library, f"{name}_work_bytes")
    bytes_for.argtypes, bytes_for.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    return int(bytes_for(width, values, keys, itemsize))


def _along_rows(x: Array) -> Array:
    """The numbers of a row one after the other; rows may lie anywhere."""
    return x if x.strides[-1] == x.itemsize or x.shape[-1] == 1 else np.ascontiguousarray(x)


def _shape(q: Array, k: Array, v: Array, causal: bool, arrays: tuple[Array | None, ...], dropping: Dropping | None) -> Array:
    """The C code's `Shape`: sizes, where random words are, and of each array how many numbers lie between two batches, heads and
    positions."""
    numbers = [*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], causal]
    numbers += (0, 0) if dropping is None else dropping.steps(q.shape[2], k.shape[2])
    size = q.itemsize
    for x in arrays:
        numbers += (0, 0, 0) if x is None else (x.strides[0] // size, x.strides[1] // size, x.strides[2] // size)
    return np.array(numbers, np.int64)


def in_numba(name: str, between: str) -> Callable[[], Function]:
    """`forward` with what `kernels.loops.attention` does between its products, behind the check that C has."""
    def factory() -> Function:
        steps = getattr(import_module("mpitrain.kernels.loops.attention"), between)

        def run(q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool, dropping: Dropping | None = None
                ) -> tuple[Array, Array]:
            q, k, v = _along_rows(q), _along_rows(k), _along_rows(v)
            _check(name, q, k, v, q[..., 0], q[..., 0], out=out, dropping=dropping)
            return forward(steps, q, k, v, out, scale, causal, dropping)
        return run
    return factory


def gradient_in_numba(name: str, between: str) -> Callable[[], Function]:
    """The same of `backward`."""
    def factory() -> Function:
        steps = getattr(import_module("mpitrain.kernels.loops.attention"), between)

        def run(q: Array, k: Array, v: Array, out: Array, grad: Array, tops: Array, inverses: Array, scale: float, causal: bool,
                dq: Array | None, dk: Array | None, dv: Array | None, dropping: Dropping | None = None) -> None:
            q, k, v, grad = _along_rows(q), _along_rows(k), _along_rows(v), _along_rows(grad)
            _check(f"{name}_grad", q, k, v, tops, inverses, out=out, grad=grad, dq=dq, dk=dk, dv=dv, dropping=dropping)
            backward(steps, q, k, v, out, grad, tops, inverses, scale, causal, dq, dk, dv, dropping)
        return run
    return factory


NAME, FORWARD, BACKWARD = "flash_attention", "X! X! X X X X! L:21 d M! L? i i d", "X X X X X X X X?! X?! X?! L:33 d M! L? i i d"

flash_attention = Kernel("flash_attention", partial(forward, EXPRESSIONS),
                         host(NAME, "forward", FORWARD)(partial(run_forward, NAME)), in_numba(NAME, "BETWEEN"))
"""Writes softmax(scale * q k') v into `out` and returns (tops, inverses), both (B, H, L): what the gradient wants to know.

They are each query's largest scaled score, and the inverse of its sum of exps above that, before any weight is dropped.
Arguments: q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), out (B, H, L, E), scale, causal (query i looks at keys 0..i), a
`Dropping` or None. Arrays may have any strides, `out` any but in its last dim. At least one key.
"""

flash_attention_grad = Kernel("flash_attention_grad", partial(backward, EXPRESSIONS),
                              host(NAME, "backward", BACKWARD)(partial(run_backward, NAME)), gradient_in_numba(NAME, "BETWEEN"))
"""Writes the gradients into dq, dk and dv, each where it is not None.

Arguments: q, k, v, out, grad (of out), tops, inverses, scale, causal, dq, dk, dv, the `Dropping` or None; strides as above.
"""


def _join(out: Array, tops: Array, inverses: Array, other: Array, other_tops: Array, other_inverses: Array) -> None:
    xp = array_module(out)
    low = tops.dtype.type(-float("inf"))
    top = xp.maximum(xp.where(inverses == 0, low, tops), xp.where(other_inverses == 0, low, other_tops))
    top = xp.where(top == low, top.dtype.type(0), top)                    # a query that met no key at all stays zeros
    sums = [_share(inverses, tops, top), _share(other_inverses, other_tops, top)]
    total = sums[0] + sums[1]
    inverse = xp.where(total == 0, total, 1 / xp.where(total == 0, total.dtype.type(1), total))
    out *= (sums[0] * inverse)[..., None]
    out += other * (sums[1] * inverse)[..., None]
    tops[...], inverses[...] = top, inverse


def _share(inverses: Array, tops: Array, top: Array) -> Array:
    """The sum of exps above `top`; 0 for a query that met no key."""
    xp = array_module(tops)
    none = inverses == 0
    return xp.where(none, inverses, xp.exp(xp.where(none, top, tops) - top) / xp.where(none, top.dtype.type(1), inverses))


@host("joined_attention", "join", "X! X! X! X X X L:10")
def _join_host(call: CFunction, out: Array, tops: Array, inverses: Array, other: Array, other_tops: Array,
               other_inverses: Array) -> None:
    for x, shape in ((other, out.shape), *((x, out.shape[:3]) for x in (tops, inverses, other_tops, other_inverses))):
        if x.shape != shape or not (x.flags.aligned and out.flags.aligned):
            misfit("join_attention", out, tops, inverses, other, other_tops, other_inverses)
    if out.size:
        steps = [x.strides[dim] // x.itemsize for x in (out, other) for dim in range(3)]
        shape = np.array([*out.shape, *steps], np.int64)
        call(tops, inverses, out[0, 0, 0], other_tops, other_inverses, other[0, 0, 0], shape)


join_attention = Kernel("join_attention", _join, host=_join_host)
"""Makes out (B, H, L, E), tops and inverses (B, H, L), which `flash_attention` gave for some keys, what it would give for those
and the keys of `other`.

Arguments: out, tops, inverses, other, other_tops, other_inverses; only rows of `out` and `other` are without gaps."""
