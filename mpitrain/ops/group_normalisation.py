"""Group normalisation: (x - mean) / sqrt(variance + eps) * weight + bias, of each sample over groups of channels."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor, differentiate
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import batch_norm as by_channel
from mpitrain.kernels.batch_norm import channel_affine, channel_scale, channel_shift, channel_sums
from mpitrain.ops import composed
from mpitrain.ops.normalisation import as_channels, check_channels

__all__ = ["group_norm"]


def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """Normalises each sample of x (N, C, ...) over groups of neighbouring channels; weight and bias are (C,)."""
    check_channels("group_norm", x, weight, bias)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ShapeError(f"group_norm: {x.shape[1]} channels cannot be split into {num_groups} groups")
    return GroupNorm.apply(x, weight, bias, groups=num_groups, eps=eps)


class GroupNorm(Function):
    """Statistics of each (sample, group); with x seen as one sample of N * C channels, the loops of batch norm do the rest."""

    half = "parameters"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array | None, bias: Array | None, *, groups: int, eps: float) -> Array:
        xp = ctx.xp
        n, c, size = as_channels(x).shape
        count = c // groups * size
        mean, squares = by_channel.channel_moments(x.reshape(1, n * groups, count))
        inverse = (1 / xp.sqrt(squares / max(count, 1) + eps)).repeat(c // groups)
        centre = mean.astype(by_channel.channel_dtype(x.dtype)).repeat(c // groups)
        ctx.save(x, weight, centre, inverse)
        ctx.groups, ctx.count, ctx.eps, ctx.sums = groups, count, eps, None
        scale = channel_scale(inverse, _tiled(weight, n, xp), x.dtype)
        shift = channel_shift(_tiled(bias, n, xp), x.reshape(1, n * c, size))
        return channel_affine(x.reshape(1, n * c, size), centre, scale, shift).reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight, centre, inverse = ctx.saved
        n, c, size = as_channels(x).shape
        flat = (1, n * c, size)
        if ctx.sums is None:
            ctx.sums = channel_sums(grad.reshape(flat), x.reshape(flat), centre)
        plain, product = ctx.sums
        dx = None
        if ctx.needs[0]:
            tiled = _tiled(weight, n, ctx.xp)
            scale = channel_scale(inverse, tiled, x.dtype)
            each = c // ctx.groups
            means = [((s if tiled is None else s * tiled).reshape(-1, each).sum(axis=1) / max(ctx.count, 1)).repeat(each)
                     for s in (plain, product)]
            slope = (-inverse ** 3 * means[1]).astype(centre.dtype)
            shift = (-inverse * means[0]).astype(centre.dtype)
            dx = by_channel.channel_combine(grad.reshape(flat), x.reshape(flat), centre, scale, slope, shift).reshape(x.shape)
        return (dx,
                (product * inverse).reshape(n, c).sum(axis=0).astype(centre.dtype) if ctx.needs[1] else None,
                plain.reshape(n, c).sum(axis=0).astype(centre.dtype) if ctx.needs[2] else None)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        def normalise(x: Tensor, weight: Tensor | None) -> Tensor:
            groups = x.reshape(x.shape[0] * ctx.groups, -1)
            return composed.by_channel(composed.normalised(groups, (1,), ctx.eps).reshape(x.shape), weight)

        return (*differentiate(normalise, [ctx.input(0), ctx.input(1)], [grad], ctx.needs[:2]),
                composed.channel_sums(grad) if ctx.needs[2] else None)


def _tiled(values: Array | None, times: int, xp: Any) -> Array | None:
    return None if values is None else xp.tile(values, times)
