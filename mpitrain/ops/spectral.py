"""Discrete Fourier transforms over one or more dims, with gradients. Names, dims and `norm` are PyTorch's torch.fft.

Each is a linear map, so its derivative is its adjoint: the transform the other way with the same scale. Where half of a
Hermitian spectrum stands for the whole, the numbers in it that stand for two have a weight of their own, `inner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.fft import full_transform, half_transform, real_transform
from mpitrain.ops.complex_numbers import conj, to_complex
from mpitrain.ops.inputs import as_tensor, dims_of
from mpitrain.ops.shape import concatenate, pad, split

__all__ = ["fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ifftshift",
           "ihfft", "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn"]

Sizes = int | Sequence[int] | None
OTHER = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _full(name: str, x: Any, sizes: Sizes, dim: Any, norm: str | None, inverse: bool) -> Tensor:
    """The transform of complex numbers to complex numbers."""
    z = to_complex(x)
    dims, lengths = _plan(name, z, sizes, dim)
    z = _fitted(z, dims, lengths)
    scale = _scale(name, norm, lengths, inverse)
    return FullTransform.apply(z, dims=dims, inverse=inverse, scale=scale) if dims else z


def _half(name: str, x: Any, sizes: Sizes, dim: Any, norm: str | None) -> Tensor:
    """The transform of real numbers: that half of the last dim that the other half follows from."""
    x = as_tensor(x)
    if x.dtype.kind == "c":
        raise ShapeError(f"{name}: the input is {x.dtype}, expected real numbers; use {name.replace('rf', 'f')} for complex ones")
    x = Tensor(x.array.astype("float32")) if x.dtype.kind in "biu" else x
    dims, lengths = _plan(name, x, sizes, dim, least=1)
    return HalfTransform.apply(_fitted(x, dims, lengths), dims=dims, scale=_scale(name, norm, lengths, False), inner=1.0)


def _real(name: str, x: Any, sizes: Sizes, dim: Any, norm: str | None) -> Tensor:
    """The inverse of `_half`, of a last dim that is half of a Hermitian one."""
    z = to_complex(x)
    dims, lengths = _plan(name, z, sizes, dim, least=1, half=True)
    length = lengths[-1]
    z = _fitted(z, dims, (*lengths[:-1], length // 2 + 1))
    return RealTransform.apply(z, dims=dims, size=length, scale=_scale(name, norm, lengths, True), inner=1.0)


def _norm(name: str, norm: str | None) -> str:
    if norm not in (None, *OTHER):
        raise ShapeError(f'{name}: norm is {norm!r}, expected "backward", "forward" or "ortho"')
    return norm or "backward"


def _scale(name: str, norm: str | None, lengths: Sequence[int], inverse: bool) -> float:
    norm, n = _norm(name, norm), prod(lengths)
    return 1 / sqrt(n) if norm == "ortho" else 1 / n if (norm == "backward") == inverse else 1.0


def _plan(name: str, x: Tensor, sizes: Sizes, dim: Any, least: int = 0,
          half: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims, counted from 0, and the length of the transform along each."""
    given = [sizes] if isinstance(sizes, int) else None if sizes is None else list(sizes)
    if dim is None and given is not None:
        dim = tuple(range(-len(given), 0))
    if x.ndim == 0 and (dim is None or isinstance(dim, int) or len(dim)):
        raise ShapeError(f"{name}: the input has no dims, expected one or more")
    dims = dims_of(name, x, dim)
    if given is None:
        given = [-1] * len(dims)
    if len(given) != len(dims):
        raise ShapeError(f"{name}: {len(given)} sizes {sizes} for {len(dims)} dims {dim}; give one for each")
    if len(dims) < least:
        raise ShapeError(f"{name}: no dims to transform, expected one or more")
    lengths = [x.shape[d] if n == -1 else n for d, n in zip(dims, given)]
    if half and given[-1] == -1:
        lengths[-1] = 2 * (x.shape[dims[-1]] - 1)
    if min(lengths, default=1) < 1:
        raise ShapeError(f"{name}: transforms of length {min(lengths)}, of an input of shape {x.shape}; they must be at least 1")
    return dims, tuple(lengths)


def _fitted(x: Tensor, dims: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """x with these lengths: cut off at the end, or with zeros there."""
    after = {d: n - x.shape[d] for d, n in zip(dims, lengths)}
    return pad(x, [(0, after.get(d, 0)) for d in range(x.ndim)]) if any(after.values()) else x


class FullTransform(Function):
    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array, *, dims: tuple[int, ...], inverse: bool, scale: float) -> Array:
        ctx.plan = {"dims": dims, "inverse": not inverse, "scale": scale}
        return full_transform(z, dims, inverse, scale)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return FullTransform.apply(grad, **ctx.plan)


class HalfTransform(Function):
    """The spectrum of real numbers, without the second half of the last of `dims`."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, dims: tuple[int, ...], scale: float, inner: float) -> Array:
        ctx.plan = {"dims": dims, "size": x.shape[dims[-1]], "scale": scale, "inner": inner / 2}
        x, others = _last(ctx.xp, x, dims)
        return ctx.xp.moveaxis(half_transform(x, others, scale, inner), -1, dims[-1])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return RealTransform.apply(grad, **ctx.plan)


class RealTransform(Function):
    """The real numbers whose spectrum begins with z."""

    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array, *, dims: tuple[int, ...], size: int, scale: float, inner: float) -> Array:
        ctx.plan = {"dims": dims, "scale": scale, "inner": 2 * inner}
        z, others = _last(ctx.xp, z, dims)
        return ctx.xp.moveaxis(real_transform(z, size, others, scale, inner), -1, dims[-1])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return HalfTransform.apply(grad, **ctx.plan)


def _last(xp: Any, x: Array, dims: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """x with the last of `dims` as its own last, and where the others are then."""
    last = dims[-1]
    return xp.moveaxis(x, last, -1), tuple(d - (d > last) for d in dims[:-1])


def fft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The transform sum_j x_j exp(-2 pi i j k / n) along `dim`, complex.

    `n`: the length to which x is cut, or filled with zeros. `norm`: "backward" (default) scales the inverse by 1/n, "forward"
    this, "ortho" both by 1/sqrt(n). float32 gives complex64, float64 complex128. ShapeError where the arguments do not fit x.
    """
    return _full("fft", x, n, dim, norm, False)


def ifft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of `fft`."""
    return _full("ifft", x, n, dim, norm, True)


def fft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    """`fft` along two dims; `s` are the lengths."""
    return _full("fft2", x, s, dim, norm, False)


def ifft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    return _full("ifft2", x, s, dim, norm, True)


def fftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    """`fft` along some dims, by default all, or as many of the last as `s` has lengths."""
    return _full("fftn", x, s, dim, norm, False)


def ifftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    return _full("ifftn", x, s, dim, norm, True)


def rfft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The first n // 2 + 1 numbers of the `fft` of real x; the others are their conjugates."""
    return _half("rfft", x, n, dim, norm)


def irfft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of `rfft`: `n` real numbers, by default 2 (m - 1) of m complex ones."""
    return _real("irfft", x, n, dim, norm)


def rfft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    """`rfft` along the last of two dims, `fft` along the other."""
    return _half("rfft2", x, s, dim, norm)


def irfft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    return _real("irfft2", x, s, dim, norm)


def rfftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    return _half("rfftn", x, s, dim, norm)


def irfftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    return _real("irfftn", x, s, dim, norm)


def hfft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The real transform of what is Hermitian in time, given by its first half; its inverse is `ihfft`."""
    return _real("hfft", conj(x), n, dim, OTHER[_norm("hfft", norm)])


def ihfft(x: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    return conj(_half("ihfft", x, n, dim, OTHER[_norm("ihfft", norm)]))


def hfft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    return _real("hfft2", conj(x), s, dim, OTHER[_norm("hfft2", norm)])


def ihfft2(x: Any, s: Sizes = None, dim: Any = (-2, -1), norm: str | None = None) -> Tensor:
    return conj(_half("ihfft2", x, s, dim, OTHER[_norm("ihfft2", norm)]))


def hfftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    return _real("hfftn", conj(x), s, dim, OTHER[_norm("hfftn", norm)])


def ihfftn(x: Any, s: Sizes = None, dim: Any = None, norm: str | None = None) -> Tensor:
    return conj(_half("ihfftn", x, s, dim, OTHER[_norm("ihfftn", norm)]))


def fftshift(x: Any, dim: Any = None) -> Tensor:
    """x with the frequency 0 moved from the first place to the middle, along all dims or some."""
    return _shifted("fftshift", x, dim, lambda n: n // 2)


def ifftshift(x: Any, dim: Any = None) -> Tensor:
    """The inverse of `fftshift`."""
    return _shifted("ifftshift", x, dim, lambda n: n - n // 2)


def _shifted(name: str, x: Any, dim: Any, by: Any) -> Tensor:
    result = as_tensor(x)
    for d in dims_of(name, result, dim):
        n = result.shape[d]
        if shift := by(n) % max(n, 1):
            first, last = split(result, [n - shift, shift], d)
            result = concatenate([last, first], d)
    return result


def fftfreq(n: int, d: float = 1.0) -> Tensor:
    """The frequencies of `fft`'s n numbers, in cycles per unit of the sample spacing `d`, float32."""
    return _frequencies("fftfreq", n, d, (n + 1) // 2, n)


def rfftfreq(n: int, d: float = 1.0) -> Tensor:
    """Those of `rfft`'s."""
    return _frequencies("rfftfreq", n, d, n // 2 + 1, n // 2 + 1)


def _frequencies(name: str, n: int, d: float, rising: int, count: int) -> Tensor:
    if n < 1 or d == 0:
        raise ShapeError(f"{name}: n is {n} and d is {d}; expected n of at least 1, and d other than 0")
    return Tensor([(k if k < rising else k - n) / (n * d) for k in range(count)])
