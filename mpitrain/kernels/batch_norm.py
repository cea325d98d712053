"""The loops of batch and group norm: by channel of x (N, C, L).

What belongs to a channel is a 1-D array. Sums over a channel are float64 whatever the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.backend.dtype import statistics_dtype
from mpitrain.errors import ArgumentError
from mpitrain.kernels import pointwise
from mpitrain.kernels.kernel import Function, Kernel
from mpitrain.kernels.library import CFunction, host, packed, same_shape

Into: TypeAlias = tuple[Array | None, Array | None]
NOWHERE: Into = (None, None)


def _moments(x: Array) -> tuple[Array, Array]:
    mean = x.sum(axis=(0, 2), dtype="float64") / max(x.shape[0] * x.shape[2], 1)
    return mean, ((x - mean[:, None]) ** 2).sum(axis=(0, 2))


def _affine(x: Array, centre: Array, scale: Array, shift: Array) -> Array:
    y = x - centre[:, None]
    y *= scale[:, None]
    y += shift[:, None]
    return y


def _sums(grad: Array, x: Array, centre: Array) -> tuple[Array, Array]:
    return grad.sum(axis=(0, 2), dtype="float64"), (grad * (x - centre[:, None])).sum(axis=(0, 2), dtype="float64")


def _combine(grad: Array, x: Array, centre: Array, a: Array, b: Array, d: Array) -> Array:
    result = x - centre[:, None]
    result *= b[:, None]
    result += a[:, None] * grad
    result += d[:, None]
    return result


RELU, RELU6, HARDSWISH, SILU = 1, 2, 3, 4         # the activations of native/activated.h
ACTIVATIONS = {"relu": RELU, "relu6": RELU6, "hardswish": HARDSWISH, "silu": SILU}


def _activated(u: Array, activation: int) -> Array:
    """The activation of u, in its memory."""
    xp, real = array_module(u), u.dtype.type
    if not activation:
        return u
    if activation == SILU:
        return pointwise.ACTIVATIONS["silu"].values.reference(u, u)
    if activation == HARDSWISH:
        v = u + real(3)
        u *= xp.minimum(xp.maximum(v, real(0), out=v), real(6), out=v)
        u *= real(1 / 6)
        return u
    xp.maximum(u, real(0), out=u)
    return u if activation == RELU else xp.minimum(u, real(6), out=u)


def _passed(grad: Array, u: Array, activation: int) -> Array:
    """The gradient of u, of which `grad` is that of the activated numbers; of ReLU, u may be these."""
    xp, real = array_module(u), u.dtype.type
    if activation == SILU:
        s = pointwise.sigmoid.reference(u)
        return grad * (s * (1 + u * (1 - s)))
    if activation == HARDSWISH:
        grad = grad * xp.where(u < 3, u * real(1 / 3) + real(0.5), real(1))
        return xp.where(u <= -3, real(0), grad)
    return xp.where((u <= 0) | (u >= 6) if activation == RELU6 else u <= 0, real(0), grad)


def unbiased(count: Any) -> Any:
    """The factor of a variance of so many numbers, or 1 where they are too few to have one."""
    return count / (count - 1) if not isinstance(count, int) or count > 1 else 1.0


def add_statistics(tally: Array, mean: Array, variance: Array, count: Any) -> None:
    """Adds to a `tally` (2 C + 1,), float64, the mean and the unbiased variance of `count` numbers of each channel, and 1."""
    channels = len(mean)
    tally[:channels] += mean
    tally[channels:2 * channels] += variance * unbiased(count)
    tally[2 * channels:] += 1


def _batch_norm(x: Array, weight: Array | None, bias: Array | None, residual: Array | None, eps: float,
                activation: int, tally: Array | None = None) -> tuple[Array, Array, Array, Array]:
    xp = array_module(x)
    mean, squares = _moments(x)
    variance = squares / max(x.shape[0] * x.shape[2], 1)
    inverse = 1 / xp.sqrt(variance + eps)
    y = _affine(x, mean.astype(x.dtype), channel_scale(inverse, weight, x.dtype), channel_shift(bias, x))
    if residual is not None:
        y += residual
    if tally is not None:
        add_statistics(tally, mean, variance, x.shape[0] * x.shape[2])
    return _activated(y, activation), mean, variance, inverse


def fill(into: Into, plain: Array, product: Array, inverse: Array) -> None:
    """Writes the gradients of weight and bias where there is memory for them."""
    for out, values in zip(into, (product, plain)):
        if out is not None:
            out[...] = values * inverse if values is product else values


def _batch_norm_gradients(grad: Array, x: Array, y: Array | None, centre: Array, weight: Array | None, bias: Array | None,
                          inverse: Array, activation: int, wanted: bool,
                          into: Into = NOWHERE) -> tuple[Array | None, Array, Array, Array]:
    scale = channel_scale(inverse, weight, x.dtype)
    if activation:
        grad = _passed(grad, _affine(x, centre, scale, channel_shift(bias, x)) if y is None else y, activation)
    plain, product = _sums(grad, x, centre)
    fill(into, plain, product, inverse)
    if not wanted:
        return None, grad, plain, product
    count = max(x.shape[0] * x.shape[2], 1)
    slope, shift = -scale * inverse * inverse * (product / count), -scale * (plain / count)
    return _combine(grad, x, centre, scale, slope.astype(x.dtype), shift.astype(x.dtype)), grad, plain, product


def channel_scale(inverse: Array, weight: Array | None, dtype: Any) -> Array:
    """The factor of x - centre, for x of that dtype."""
    return (inverse if weight is None else inverse * weight).astype(statistics_dtype(dtype))


def channel_shift(bias: Array | None, x: Array) -> Array:
    return array_module(x).zeros(x.shape[1], statistics_dtype(x.dtype)) if bias is None else bias


def _two_sums(function: CFunction, *arrays: Array) -> tuple[Array, Array]:
    """Two numbers in float64 of each channel, which `function` computes."""
    first, second = np.empty((2, arrays[0].shape[1]))
    function(*[packed(array) for array in arrays], first, second, *arrays[0].shape)
    return first, second


PLAIN = (0, RELU)                  # activations that go with a residual and without


def _check(kernel: str, activation: int, beside: Array | None) -> None:
    """No number that the C code has no activation for, and after a residual (whose y is kept) none but ReLU."""
    if activation not in (0, *ACTIVATIONS.values()) or (activation > RELU and beside is not None):
        raise ArgumentError(f"{kernel}: activation is {activation}, expected 0 to {RELU if beside is not None else SILU}"
                            f"{' beside a residual' if beside is not None else ''}")


@host("batch_norm", "batch_norm", "X:ncl X?:c X?:c X?:ncl X!:ncl D!:c D!:c D!:c d in ic il i")
def _batch_norm_host(function: CFunction, x: Array, weight: Array | None, bias: Array | None, residual: Array | None,
                     eps: float, activation: int, tally: Array | None = None) -> tuple[Array, Array, Array, Array]:
    if activation not in PLAIN:
        _check("batch_norm", activation, residual)
    y, (mean, variance, inverse) = np.empty(x.shape, x.dtype), np.empty((3, x.shape[1]))
    function(packed(x), packed(weight), packed(bias), packed(residual), y, mean, variance, inverse, eps, *x.shape, activation)
    if tally is not None:
        add_statistics(tally, mean, variance, x.shape[0] * x.shape[2])
    return y, mean, variance, inverse


@host("batch_norm", "batch_norm_gradients",
      "X:ncl X:ncl X?:ncl X:c X?:c X?:c D:c X?!:ncl X?!:ncl D!:c D!:c in ic il i")
def _batch_norm_gradients_host(function: CFunction, grad: Array, x: Array, y: Array | None, centre: Array, weight: Array | None,
                               bias: Array | None, inverse: Array, activation: int, wanted: bool,
                               into: Into = NOWHERE) -> tuple[Array | None, Array, Array, Array]:
    if activation not in PLAIN:
        _check("batch_norm_gradients", activation, y)
    grad = np.ascontiguousarray(grad)
    plain, product = np.empty((2, x.shape[1]))
    dx = np.empty(x.shape, x.dtype) if wanted or activation == SILU else None          # SiLU's gradient is kept there first
    masked = activation + (y is None) if activation else 0
    before = np.empty(x.shape, x.dtype) if masked == 1 else grad
    function(grad, packed(x), packed(y) if masked == 1 else None, centre, packed(weight), packed(bias), inverse, dx,
             before if masked == 1 else None, plain, product, *x.shape, masked)
    fill(into, plain, product, inverse)
    return dx if wanted else None, before, plain, product


def _kernel(name: str, reference: Function, signature: str, body: Callable[..., Any]) -> Kernel:
    version = host("batch_norm", name, signature)(body)
    return Kernel(name, reference, version, version.loop("batch_norm"))


channel_moments = _kernel("channel_moments", _moments, "X:ncl D!:c D!:c in ic il", _two_sums)
"""(mean, sum of squared distances from it), float64 (C,), from x."""

channel_affine = _kernel("channel_affine", _affine, "X:ncl X:c X:c X:c X!:ncl in ic il", same_shape)
"""(x - centre) * scale + shift from (x, centre, scale, shift)."""

channel_sums = _kernel("channel_sums", _sums, "X:ncl X:ncl X:c D!:c D!:c in ic il", _two_sums)
"""Sums of grad and of grad * (x - centre), float64 (C,), from (grad, x, centre)."""

channel_combine = _kernel("channel_combine", _combine, "X:ncl X:ncl X:c X:c X:c X:c X!:ncl in ic il", same_shape)
"""a * grad + b * (x - centre) + d from (grad, x, centre, a, b, d)."""

batch_norm = Kernel("batch_norm", _batch_norm, _batch_norm_host, _batch_norm_host.loop("batch_norm"))
"""(y, mean, variance, inverse deviation; the latter float64 (C,)) from (x, weight, bias, residual or None, eps, activation, tally
or None): x normalised over N and L, plus the residual, and one of ACTIVATIONS of that, 0 for none. After a residual it is ReLU or
none. The statistics are added to the tally: `add_statistics`."""

batch_norm_gradients = Kernel("batch_norm_gradients", _batch_norm_gradients, _batch_norm_gradients_host,
                              _batch_norm_gradients_host.loop("batch_norm"))
"""(gradient of x or None, gradient before the activation, sums of that, and of its product with x - centre, float64 (C,)) from
(grad, x, y, centre, weight, bias, inverse deviation, activation, whether the first is wanted, and memory for the gradients of
weight and bias, `Into`). y, of ReLU alone, may be None
where there was no residual: then the second result is undefined."""


def _move_running(values: Array, sums: Array, momenta: Array, table: Array) -> None:
    real = values.dtype.type
    for (start, size), momentum in zip(asnumpy(table).tolist(), asnumpy(momenta).tolist(), strict=True):
        old, found, count = values[start:start + size], sums[start:start + size], float(sums[start + size])
        if not count:
            continue
        if not momentum:
            values[start + size] += 1
            momentum = 1.0 / float(values[start + size])
        old[...] = real(1.0 - momentum) * old + momentum * (found / count)
        sums[start:start + size + 1] = 0


move_running = Kernel("move_running", _move_running)
"""(values, sums, momenta (layers,), table (layers, 2)): moves the running statistics of layers, once a step. Both flat arrays
have `size` numbers of a layer from `start` on, a row of the table, and then how many steps there were, beside how many statistics
were added up since the last one, which are forgotten. New values are (1 - momentum) old + momentum mean; momentum 0 stands for
1 / steps. Sums, which are float64, and momenta stay so in all formats."""
