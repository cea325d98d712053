"""Discrete Fourier transforms, many lines at a time: NumPy's as the expressions, and our own in C (native/fft.c).

Lengths with a prime factor above 127 are left to NumPy, and so is everything where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.fft_plan import plan, suits
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, bind, misfit, packed

MOST_KEPT = 16 << 20                              # bytes of working memory kept between calls; the rest is had anew by each
COMPLEX: dict[Any, Any] = {np.dtype("f"): np.dtype("F"), np.dtype("d"): np.dtype("D")}
REAL: dict[Any, Any] = {pair: number for number, pair in COMPLEX.items()}


def _check_dims(x: Array, dims: tuple[int, ...], kept: int = 0) -> None:
    """ShapeError unless `dims` are some of x's, without the last `kept` ones."""
    if not all(0 <= d < x.ndim - kept for d in dims):
        misfit(f"transforms along dims {dims}", x)


def _check_half(z: Array, n: int) -> None:
    if z.shape[-1] != n // 2 + 1:
        misfit(f"real_transform to {n} numbers", z)


def _full(z: Array, dims: tuple[int, ...], inverse: bool, scale: float) -> Array:
    _check_dims(z, dims)
    fft = array_module(z).fft
    y = (fft.ifftn if inverse else fft.fftn)(z, axes=dims, norm="forward" if inverse else "backward") if dims else z
    return y if scale == 1 else y * y.real.dtype.type(scale)


def weights(xp: Any, dtype: Any, n: int, scale: float, inner: float) -> Array:
    """`scale` for each number of half a spectrum of n, times `inner` for those that stand for two."""
    found = xp.full(n // 2 + 1, scale * inner, dtype)
    found[0] = scale
    if n % 2 == 0:
        found[-1] = scale
    return found


def _half(x: Array, dims: tuple[int, ...], scale: float, inner: float) -> Array:
    _check_dims(x, dims, 1)
    y = array_module(x).fft.rfft(x)
    if scale != 1 or inner != 1:
        y = y * weights(array_module(x), x.dtype, x.shape[-1], scale, inner)
    return _full(y, dims, False, 1)


def _real(z: Array, n: int, dims: tuple[int, ...], scale: float, inner: float) -> Array:
    xp = array_module(z)
    _check_half(z, n)
    _check_dims(z, dims, 1)
    z = _full(z, dims, True, 1)
    if scale != 1 or inner != 1:
        z = z * weights(xp, z.real.dtype, n, scale, inner)
    return xp.fft.irfft(z, n, norm="forward")


class Calls(NamedTuple):
    full: CFunction
    half: CFunction
    real: CFunction


def _in_c(body: Callable[..., Array]) -> Callable[[], Callable[..., Array] | None]:
    def factory() -> Callable[..., Array] | None:
        found: list[Any] = [bind("fft", "fft", "X:onik X!:onik X L:176 M!:w iw io in ii i d ik"),
                 bind("fft", "fft_half", "X:on X!:om X L:176 M!:w iw io in im d d"),
                 bind("fft", "fft_real", "X:om X!:on X L:176 M!:w iw io in im d d")]
        return None if None in found else partial(body, Calls(*found))
    return factory


_scratch = Scratch()


def _memory(nbytes: int) -> Array:
    return _scratch.room(nbytes) if nbytes <= MOST_KEPT else np.empty(nbytes, np.uint8)


def _suited(x: Array, dims: tuple[int, ...]) -> bool:
    _check_dims(x, dims)
    return all(suits(x.shape[d]) for d in dims)


def _along(call: CFunction, x: Array, y: Array, dims: tuple[int, ...], inverse: bool, scale: float) -> None:
    """From x to y, both without gaps; they may be one."""
    dtype = REAL[x.dtype]
    to = y.view(dtype).reshape(-1)
    if not to.size:
        return
    for d in reversed(dims):
        n, inner = y.shape[d], prod(y.shape[d + 1:])
        numbers, tables, work = plan(n, False, dtype)
        memory = _memory(work)
        outer = y.size // (n * inner)
        call(x.view(dtype).reshape(-1), to, tables, numbers, memory, work, outer, n, inner, inverse, scale, 2)
        x, scale = y, 1.0


def _lines(call: CFunction, x: Array, y: Array, n: int, scale: float, inner: float) -> None:
    """Lines of n real numbers to half of their spectra, or back."""
    if not y.size:
        return
    dtype = y.real.dtype
    numbers, tables, work = plan(n, True, dtype)
    memory = _memory(work)
    call(packed(x).view(dtype), y.view(dtype), tables, numbers, memory, work, prod(x.shape[:-1]), n,
         2 * (n // 2 + 1), scale, scale * inner)


@_in_c
def _full_host(calls: Calls, z: Array, dims: tuple[int, ...], inverse: bool, scale: float) -> Array:
    if z.dtype not in REAL or not dims or not _suited(z, dims):
        return _full(z, dims, inverse, scale)
    y = np.empty(z.shape, z.dtype)
    _along(calls.full, packed(z), y, dims, inverse, scale)
    return y


@_in_c
def _half_host(calls: Calls, x: Array, dims: tuple[int, ...], scale: float, inner: float) -> Array:
    n = x.shape[-1]
    if x.dtype not in COMPLEX or not suits(n // 2 if n % 2 == 0 else n) or not _suited(x[..., 0], dims):
        return _half(x, dims, scale, inner)
    y = np.empty((*x.shape[:-1], n // 2 + 1), COMPLEX[x.dtype])
    _lines(calls.half, x, y, n, scale, inner)
    _along(calls.full, y, y, dims, False, 1)
    return y


@_in_c
def _real_host(calls: Calls, z: Array, n: int, dims: tuple[int, ...], scale: float, inner: float) -> Array:
    _check_half(z, n)
    if z.dtype not in REAL or not suits(n // 2 if n % 2 == 0 else n) or not _suited(z[..., 0], dims):
        return _real(z, n, dims, scale, inner)
    if dims:
        z, given = np.empty(z.shape, z.dtype), z
        _along(calls.full, packed(given), z, dims, True, 1)
    y = np.empty((*z.shape[:-1], n), REAL[z.dtype])
    _lines(calls.real, z, y, n, scale, inner)
    return y


full_transform = Kernel("full_transform", _full, host=_full_host)
"""sum_j z_j exp(-+2 pi i j k / n) along `dims` (counted from 0), times `scale`, from (z, dims, inverse, scale)."""

half_transform = Kernel("half_transform", _half, host=_half_host)
"""The first n // 2 + 1 numbers of the transform of real x (..., n), times `scale`, and `inner` where one stands for two; then the
transform along `dims`, others than the last; from (x, dims, scale, inner)."""

real_transform = Kernel("real_transform", _real, host=_real_host)
"""The inverse along `dims`, others than the last, unscaled; of that, z (..., n // 2 + 1) times `scale`, and `inner` where one
stands for two, the n real numbers whose unscaled spectrum begins so; from (z, n, dims, scale, inner)."""
