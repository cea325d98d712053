"""Products of matrices, where they are faster than NumPy's, and there of the same bits whatever the batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any

import numpy as np

from mpitrain.backend.dtype import is_half
from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.native import load
from mpitrain.backend.runtime import runtime
from mpitrain.kernels.kernel import FORMATS, Kernel
from mpitrain.kernels.library import Host, Scratch
from mpitrain.kernels.wire import format_of

LEAST_ROWS, LEAST_COLUMNS, LEAST_WORK = 8, 8, 1 << 20         # M, N and M N K; NumPy is faster at smaller products
SIGNATURE = "X:mk X:kn X?:n X!:mn M! im in ik i i i i"       # x, y, bias, out, memory, M, N, K, and four strides
SINGLE = np.dtype(np.float32)
KINDS = (np.dtype(np.float32), np.dtype(np.float64))          # Other byte orders are left to NumPy.


def product(x: Array, y: Array, bias: Array | None = None, out: Array | None = None, operands: str = "") -> Array:
    """x (M, K) y (K, N) + bias (N,), in `out` where given (C-contiguous, overlapping none of the others).

    With `operands` "bfloat16", x and y of float32 are rounded to that format first, where the product is large enough for a
    kernel of ours; sums and result stay float32.

    From M = 8, N = 8 and M N K = 2**20 on this is our own C version, whose bits in a row depend on that row, y and bias alone;
    smaller products are NumPy's. It runs on one thread, so where BLAS has several all is left to BLAS, as it is on CPUs without
    AVX-512, where OpenBLAS is 1.05 times as fast. ``benchmarks/products_vs_torch.py`` compares.

    On a device all of them are its library's, and operands of float32 are rounded however small the product is.
    """
    if type(x) is not np.ndarray and on_device(x, y):
        return _multiply()(x, y, bias, out, operands=operands)
    if _suits(x, y, out):
        if operands == "bfloat16" and x.dtype == SINGLE:
            return native_bfloat16(x, y, bias, out)
        if one_thread() and is_fast():
            return native(x, y, bias, out)
    return _product(x, y, bias, out)


def products(x: Array, y: Array, operands: str = "", out: Array | None = None) -> Array:
    """x (..., M, K) y (..., K, N), whose leading dims broadcast. On the host `operands` is for `product` alone."""
    if type(x) is not np.ndarray and on_device(x, y):
        return _multiply()(x, y, None, out, operands=operands)
    return array_module(x).matmul(x, y, out=out)


def add_product(x: Array, y: Array, out: Array, operands: str = "") -> Array:
    """Adds x (M, K) y (K, N) to `out`, of arrays for which `on_device` is True."""
    return _multiply()(x, y, None, out, operands=operands, beta=1.0)


def on_device(x: Array, y: Array) -> bool:
    """Whether a device has products of these arrays: of floats, in one of the formats that its kernels take."""
    return runtime(array_module(x).__name__) is not None and x.dtype.name in FORMATS and y.dtype.name in FORMATS


@cache
def _multiply() -> Callable[..., Array]:
    from mpitrain.kernels.device.product import multiply  # no run on the host imports it
    return multiply


@cache
def one_thread() -> bool:
    """True where BLAS runs on one thread. Looked at once: after changing their number, call ``one_thread.cache_clear()``."""
    from threadpoolctl import threadpool_info
    return all(pool["num_threads"] == 1 for pool in threadpool_info() if pool["user_api"] == "blas")


class _Inside:
    """How many are inside of `one_thread_inside`, in any threads of the program, and what BLAS had before the first of them."""

    lock, count = Lock(), 0
    before: Any = None


@contextmanager
def one_thread_inside() -> Iterator[None]:
    """Linear algebra has one thread inside, and the bits of one, however many the program has. Several threads may be inside at
    once: the last that leaves gives back what the first has found."""
    with _Inside.lock:
        counts = _Inside.count > 0 or not one_thread()
        if counts and not _Inside.count:
            from threadpoolctl import threadpool_limits
            _Inside.before = threadpool_limits(1)
            one_thread.cache_clear()
        _Inside.count += counts
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.count -= counts
            if counts and not _Inside.count:
                _Inside.before.restore_original_limits()
                one_thread.cache_clear()


@cache
def is_fast() -> bool:
    """Whether our version was compiled for a CPU on which it is faster than BLAS: a rule, so that ranks of one kind agree."""
    library = load("product")
    return library is not None and bool(library.product_is_fast())


def _product(x: Array, y: Array, bias: Array | None, out: Array | None) -> Array:
    result = array_module(x).matmul(x, y, out=out)
    if out is None and result.dtype != x.dtype and is_half(x.dtype):      # NumPy has no product of such numbers but float32's
        result = result.astype(x.dtype)
    if bias is not None:
        result += bias
    return result


@cache
def work_bytes() -> int:
    """The memory that a product packs its blocks in; 0 where there is no compiler."""
    library = load("product")
    return 0 if library is None else int(library.product_work_bytes())


def _product_bfloat16(x: Array, y: Array, bias: Array | None, out: Array | None) -> Array:
    return _product(rounded(x), rounded(y), bias, out)


def rounded(x: Array) -> Array:
    """float32 with the values of the nearest bfloat16 numbers."""
    result = np.array(x, np.float32, order="C")
    format_of("bfloat16").round(result.reshape(-1), np.empty(result.size, np.uint16))
    return result


@cache
def work_bytes_bfloat16() -> int:
    """The same of bfloat16 products."""
    library = load("product_bfloat16")
    if library is None:
        return 0
    library.product_bfloat16_work_bytes.restype = ctypes.c_int64
    return int(library.product_bfloat16_work_bytes())


def has_bfloat16_instruction() -> bool:
    """Whether bfloat16 products are compiled for an instruction of this CPU. Without one they are slower than float32's."""
    library = load("product_bfloat16")
    return library is not None and bool(library.product_bfloat16_is_fast())


def _packing(scratch: Scratch, nbytes: Callable[[], int], call: Callable[..., None], x: Array, y: Array, bias: Array | None,
             out: Array | None) -> Array:
    """`call` of C on matrices: their layout told in strides, with `nbytes()` of memory for packed blocks."""
    m, k = x.shape
    n = y.shape[1]
    result = np.empty((m, n), x.dtype) if out is None else out
    x, x_row, x_term = (x, k, 1) if x.flags.c_contiguous else (x.T, 1, m)
    y, y_term, y_column = (y, n, 1) if y.flags.c_contiguous else (y.T, 1, k)
    added = None if bias is None else np.ascontiguousarray(bias, x.dtype)
    call(x, y, added, result, scratch.room(nbytes()), m, n, k, x_row, x_term, y_term, y_column)
    return result


def _suits(x: Array, y: Array, out: Array | None) -> bool:
    return (type(x) is np.ndarray and type(y) is np.ndarray and x.dtype == y.dtype and x.dtype in KINDS
            and x.shape[0] >= LEAST_ROWS and y.shape[1] >= LEAST_COLUMNS and x.shape[1] == y.shape[0]
            and x.size * y.shape[1] >= LEAST_WORK and x.flags.forc and y.flags.forc
            and (out is None or (type(out) is np.ndarray and out.flags.carray and out.dtype == x.dtype
                                 and out.shape == (x.shape[0], y.shape[1]))))


native = Kernel("product", _product, host=Host(partial(_packing, Scratch(), work_bytes), "product", "product", SIGNATURE,
                                               answers=False))
native_bfloat16 = Kernel("product_bfloat16", _product_bfloat16, host=Host(
    partial(_packing, Scratch(), work_bytes_bfloat16), "product_bfloat16", "product_bfloat16", SIGNATURE.replace("X", "F"),
    answers=False))
