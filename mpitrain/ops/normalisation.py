"""Batch normalisation: (x - mean) / sqrt(variance + eps) * weight + bias, of each channel over samples and places."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor, differentiate, no_grad
from mpitrain.backend import Array
from mpitrain.backend.dtype import statistics_dtype
from mpitrain.errors import ArgumentError, GraphError, ShapeError
from mpitrain.kernels import batch_norm as by_channel
from mpitrain.kernels import pointwise
from mpitrain.kernels.batch_norm import channel_affine, channel_scale, channel_shift, channel_sums
from mpitrain.ops import activation as activations
from mpitrain.ops import choice, composed

__all__ = ["batch_norm", "batch_norm_inference"]

Reduce = Callable[[Array], None]


def batch_norm(x: Any, weight: Any = None, bias: Any = None, *, residual: Any = None, relu: bool = False, eps: float = 1e-5,
               reduce: Reduce | None = None, activation: str | None = None,
               tally: Array | None = None) -> tuple[Tensor, Array, Array, Any]:
    """Normalises each channel of x (N, C, ...) with statistics of the batch: (y, mean, variance, count).

    Then adds `residual`, of x's shape, and sets to 0 what is negative where `relu`, in the same passes over memory. So it does
    "relu6", "hardswish" and "silu", the `activation`, where there is no residual, no `reduce` and more than one value in a plane.

    Mean and (biased) variance are plain arrays (C,), outside the graph, and `count` is the number of values behind each:
    what running statistics are updated from. `reduce` sums a float64 array over the ranks in place: then the statistics
    are those of all ranks' batches. It is called once in forward and once where backward computes the gradient of x, so
    every rank must come to both. A `tally` (2 C + 1,), float64, gets mean, unbiased variance and 1 added, where it can by the
    kernel that normalises.

    Raises ShapeError where a channel has one value only: its variance says nothing.
    """
    check_channels("batch_norm", x, weight, bias, residual)
    count = prod(x.shape) // x.shape[1] if x.shape[1] else 0
    if reduce is None and count < 2:
        raise ShapeError(f"batch_norm: training needs more than one value for each channel, the input is {tuple(x.shape)}; "
                         "use larger micro-batches")
    statistics: list[Any] = []
    number = _number(activation, relu)
    apart = number > by_channel.RELU and (residual is not None or reduce is not None or prod(x.shape[2:]) < 2)
    y: Tensor = BatchNorm.apply(x, weight, bias, residual, activation=0 if apart else number, eps=eps, reduce=reduce,
                                record=statistics.extend, **({} if tally is None else {"tally": tally}))
    mean, variance, total = statistics
    return _activated(y, number) if apart else y, mean, variance, total


def batch_norm_inference(x: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *, residual: Any = None,
                         relu: bool = False, eps: float = 1e-5, activation: str | None = None) -> Tensor:
    """Normalises each channel of x (N, C, ...) with given statistics (C,), which get no gradient; the rest as `batch_norm`."""
    check_channels("batch_norm_inference", x, weight, bias, residual)
    result: Tensor = FixedNorm.apply(x, weight, bias, mean, variance, eps=eps)
    if residual is not None:
        result = result + residual
    number = _number(activation, relu)
    return _activated(result, number)


class BatchNorm(Function):
    """Statistics over all dims but 1, summed over ranks where `reduce` is given."""

    half = "parameters"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array | None, bias: Array | None, residual: Array | None, *, activation: int,
                eps: float, reduce: Reduce | None, record: Callable[[tuple[Any, ...]], None] | None = None,
                tally: Array | None = None) -> Array:
        channels = as_channels(x)
        if reduce is None and channels.shape[2] > 1:
            y, mean, variance, inverse = by_channel.batch_norm(channels, weight, bias, _channels_or_none(residual), eps,
                                                                activation, tally)
            count: Any = channels.shape[0] * channels.shape[2]
            centre = mean.astype(statistics_dtype(x.dtype), copy=False)
        else:
            centre, variance, count = BatchNorm._statistics(ctx, channels, reduce)
            if tally is not None:
                by_channel.add_statistics(tally, centre, variance.astype(centre.dtype, copy=False), count)
            inverse = 1 / ctx.xp.sqrt(variance + eps)
            y = channel_affine(channels, centre, channel_scale(inverse, weight, x.dtype), channel_shift(bias, channels))
            if residual is not None:
                y += as_channels(residual)
            if activation:
                y = pointwise.relu(y)
        y = y.reshape(x.shape)
        again = reduce is None and residual is None and channels.shape[2] > 1      # y's sign, from x
        ctx.save(x, weight, bias, centre, inverse, y if activation and not again else None)
        ctx.count, ctx.reduce, ctx.activation, ctx.eps, ctx.sums = count, reduce, activation, eps, None
        if record is not None:
            record((centre, variance.astype(centre.dtype, copy=False), count))
        return y

    @staticmethod
    def _statistics(ctx: Context, channels: Array, reduce: Reduce | None) -> tuple[Array, Array, Any]:
        xp = ctx.xp
        count: Any = channels.shape[0] * channels.shape[2]
        mean, squares = by_channel.channel_moments(channels) if count else xp.zeros((2, channels.shape[1]))
        if reduce is None:
            variance = squares / count
        else:                                         # one message: sums of values, of squares, and the count
            mean, squares = (sums.astype("float64", copy=False) for sums in (mean, squares))
            total = xp.concatenate([mean * count, squares + count * mean * mean, xp.full(1, count, dtype="float64")])
            reduce(total)
            count = total[-1]
            mean, variance = (total[:-1] / count).reshape(2, -1)
            variance = xp.maximum(variance - mean * mean, 0)
        return mean.astype(statistics_dtype(channels.dtype)), variance, count

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        dx, into = None, by_channel.NOWHERE
        if ctx.sums is None:                          # the second half of a split backward finds them here
            dx, ctx.before, into = BatchNorm._gradients(ctx, grad)
        dtype = statistics_dtype(grad.dtype)
        plain, product = ctx.sums
        return (dx,
                into[0] if into[0] is not None or not ctx.needs[1] else (product * ctx.saved[4]).astype(dtype, copy=False),
                into[1] if into[1] is not None or not ctx.needs[2] else plain.astype(dtype),
                ctx.before.reshape(grad.shape) if ctx.needs[3] else None)

    @staticmethod
    def _gradients(ctx: Context, grad: Array) -> tuple[Array | None, Array | None, by_channel.Into]:
        """The gradients of x and of the residual, and those of weight and bias that are in their own memory; leaves the sums in
        ctx."""
        x, weight, bias, centre, inverse, y = ctx.saved
        flat, channels = as_channels(grad), as_channels(x)
        if ctx.reduce is None and channels.shape[2] > 1:
            into = ctx.out(1) if ctx.needs[1] else None, ctx.out(2) if ctx.needs[2] else None
            dx, before, *ctx.sums = by_channel.batch_norm_gradients(flat, channels, _channels_or_none(y), centre, weight, bias,
                                                                    inverse, ctx.activation, ctx.needs[0], into)
            return (dx.reshape(x.shape) if dx is not None else None), before, into
        if ctx.activation:
            flat = pointwise.ACTIVATIONS["relu"].gradient(as_channels(y), flat, None)
        plain, product = ctx.sums = channel_sums(flat, channels, centre)
        if not ctx.needs[0]:
            return None, flat, by_channel.NOWHERE
        total = ctx.xp.stack([plain, product])
        if ctx.reduce is not None:
            ctx.reduce(total)
        total /= ctx.count
        scale = channel_scale(inverse, weight, x.dtype)
        slope, shift = (sums.astype(centre.dtype) for sums in (-scale * inverse * inverse * total[1], -scale * total[0]))
        return by_channel.channel_combine(flat, channels, centre, scale, slope, shift).reshape(x.shape), flat, by_channel.NOWHERE

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        if ctx.reduce is not None:
            raise GraphError("BatchNorm: with statistics over ranks it has a first derivative only; use local statistics, layer "
                             "or group norm where grad with create_graph or retain_graph goes through")
        x, weight, bias, *_, y = ctx.saved

        def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            scaled = composed.by_channel(composed.normalised(x, (0, *range(2, x.ndim)), ctx.eps), weight)
            return scaled if bias is None else scaled + bias.reshape(-1, *(1,) * (x.ndim - 2))

        given = [ctx.input(i) for i in range(3)]
        if ctx.activation > by_channel.RELU:
            def whole(*given: Any) -> Tensor:
                y = normalise(*given)             # of `silu`, a derivative more would take inputs that are not kept
                return y * activations.sigmoid(y) if ctx.activation == by_channel.SILU else _activated(y, ctx.activation)
            return *differentiate(whole, given, [grad], ctx.needs[:3]), None
        if ctx.activation and y is None:              # nothing was added before it
            with no_grad():
                y = normalise(*given).array
        if ctx.activation:
            grad = choice.where(y <= 0, grad.dtype.type(0), grad)
        return *differentiate(normalise, given, [grad], ctx.needs[:3]), grad


class FixedNorm(Function):
    """The same with given statistics: a map of each channel."""

    half = "parameters"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array | None, bias: Array | None, mean: Array, variance: Array, *,
                eps: float) -> Array:
        xp = ctx.xp
        inverse = 1 / xp.sqrt(variance.astype("float64") + eps)
        centre = mean.astype(statistics_dtype(x.dtype))
        ctx.save(x, weight, centre, inverse)
        channels = as_channels(x)
        return channel_affine(channels, centre, channel_scale(inverse, weight, x.dtype),
                              channel_shift(bias, channels)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight, centre, inverse = ctx.saved
        scale = channel_scale(inverse, weight, x.dtype).reshape(1, -1, *(1,) * (x.ndim - 2))
        dx = (grad * scale).astype(grad.dtype, copy=False) if ctx.needs[0] else None
        if not any(ctx.needs[1:]):
            return dx, None, None, None, None
        plain, product = channel_sums(as_channels(grad), as_channels(x), centre)
        return (dx,
                (product * inverse).astype(centre.dtype) if ctx.needs[1] else None,
                plain.astype(centre.dtype) if ctx.needs[2] else None, None, None)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, weight, centre, inverse = ctx.input(0), ctx.input(1), *ctx.saved[2:]
        across = (-1, *(1,) * (x.ndim - 2))
        scaled = grad * inverse.astype(x.dtype).reshape(across)
        return (composed.by_channel(scaled, weight) if ctx.needs[0] else None,
                composed.channel_sums(scaled * (x - centre.reshape(across))) if ctx.needs[1] else None,
                composed.channel_sums(grad) if ctx.needs[2] else None, None, None)


def _number(activation: str | None, relu: bool) -> int:
    """The kernels' number of an activation. ArgumentError where they have none."""
    if activation is None:
        return by_channel.RELU if relu else 0
    if relu or activation not in by_channel.ACTIVATIONS:
        names = ", ".join(by_channel.ACTIVATIONS)
        raise ArgumentError(f'batch_norm: activation is "{activation}"{" beside relu" if relu else ""}, expected {names} or '
                            "None; apply others to the result")
    return by_channel.ACTIVATIONS[activation]


def _activated(y: Tensor, number: int) -> Tensor:
    if number <= by_channel.RELU:
        return activations.relu(y) if number else y
    if number == by_channel.SILU:
        return activations.silu(y)
    from mpitrain.ops import rectifiers  # few norms have another activation
    return rectifiers.relu6(y) if number == by_channel.RELU6 else rectifiers.hardswish(y)


def as_channels(x: Array) -> Array:
    """x (N, C, ...) as (N, C, L)."""
    return x.reshape(*x.shape[:2], prod(x.shape[2:]))


def check_channels(name: str, x: Any, weight: Any, bias: Any, residual: Any = None) -> None:
    if len(x.shape) < 2:
        raise ShapeError(f"{name}: the input has shape {tuple(x.shape)}, expected (N, C, ...)")
    for what, values in (("weight", weight), ("bias", bias)):
        if values is not None and tuple(values.shape) != (x.shape[1],):
            raise ShapeError(f"{name}: the {what} has shape {tuple(values.shape)}, the input has {x.shape[1]} channels")
    if residual is not None and tuple(residual.shape) != tuple(x.shape):
        raise ShapeError(f"{name}: the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}: not equal")


def _channels_or_none(x: Array | None) -> Array | None:
    return None if x is None else as_channels(x)
