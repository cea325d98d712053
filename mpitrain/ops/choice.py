"""Choices between values, element by element: the larger, the smaller, what lies within limits, what a mask says."""

from __future__ import annotations

import operator
from typing import Any, overload

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.autograd.function import WIDE
from mpitrain.backend import Array, is_array
from mpitrain.errors import ArgumentError
from mpitrain.ops.inputs import as_tensor

__all__ = ["clip", "maximum", "minimum", "where"]


class Maximum(Function):
    """Where both are equal, each gets half of the gradient; where one is NaN, each gets all of it, as in PyTorch."""

    broadcasts = is_arithmetic = True
    is_passed_over, choice = operator.lt, "maximum"

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        ctx.save(x, y)
        return getattr(ctx.xp, ctx.function.choice)(x, y)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        (x, y), is_passed_over = ctx.saved, ctx.function.is_passed_over
        return (grad * _share(is_passed_over(x, y), x == y, grad) if ctx.needs[0] else None,
                grad * _share(is_passed_over(y, x), x == y, grad) if ctx.needs[1] else None)


class Minimum(Maximum):
    """Where both are equal, each gets half of the gradient; where one is NaN, each gets all of it, as in PyTorch."""

    is_passed_over, choice = operator.gt, "minimum"


def _share(passed_over: Array, tie: Array, grad: Tensor) -> Array:
    """0 where the value came from elsewhere, 1/2 at a tie, else 1."""
    share = (~passed_over).astype(grad.dtype)
    share -= tie * grad.dtype.type(0.5)
    return share


class Clip(Function):
    is_arithmetic = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, low: float | None, high: float | None) -> Array:
        ctx.save(x)
        ctx.low, ctx.high = low, high
        return ctx.xp.clip(x, low, high)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        inside = ctx.xp.ones(x.shape, dtype=bool)
        if ctx.low is not None:
            inside &= x >= ctx.low
        if ctx.high is not None:
            inside &= x <= ctx.high
        return grad * inside


class Where(Function):
    half = "own"
    complex_inputs = "analytic"
    broadcasts = True

    @staticmethod
    def forward(ctx: Context, condition: Array, x: Any, y: Any) -> Array:
        ctx.save(condition)
        for number, beside in ((x, y), (y, x)):   # NumPy's where lets integers that are too large wrap around
            if type(number) is int and is_array(beside) and beside.dtype.kind in "iu":
                beside.dtype.type(number)
        made = ctx.xp.where(condition, x, y)
        if made.dtype.char in "dD" and not any(getattr(a, "dtype", None) in WIDE for a in (x, y)):
            made = made.astype(WIDE[made.dtype])     # of Python's numbers, which have PyTorch's default dtype
        return made

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        condition, = ctx.saved
        zero = grad.dtype.type(0)
        return (None, where(condition, grad, zero) if ctx.needs[1] else None,
                where(condition, zero, grad) if ctx.needs[2] else None)


def maximum(x: Any, y: Any) -> Tensor:
    """The larger of both; where they are equal, each gets half of the gradient; NaN where one is NaN, as in PyTorch."""
    return Maximum.apply(x, y)


def minimum(x: Any, y: Any) -> Tensor:
    """The smaller of both; see `maximum`."""
    return Minimum.apply(x, y)


def clip(x: Any, min: float | None = None, max: float | None = None) -> Tensor:
    """`x` limited to [min, max]; the gradient passes where x is inside, the limits included."""
    return Clip.apply(x, low=min, high=max)


@overload
def where(condition: Any, x: Any, y: Any) -> Tensor: ...


@overload
def where(condition: Any) -> tuple[Tensor, ...]: ...


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """x where `condition` is True, else y. Numbers take the dtype of the other; two of them are float32, int64 or bool.

    Of `condition` alone the places where it is True: int64 (N,) for each dim.
    """
    if x is None or y is None:
        if x is not y:
            raise ArgumentError("where: one of two choices is missing, or None; write where(condition, x, y) or where(condition)")
        return places(as_tensor(condition))
    return Where.apply(condition, x, y)


def places(x: Tensor) -> tuple[Tensor, ...]:
    """Those of all elements that are not 0, in order: int64 (N,) for each dim, and one for an array without dims."""
    return tuple([Tensor(p.astype("int64")) for p in x.xp.nonzero(x.array.reshape(x.shape or (1,)))])


def signs(x: Array) -> Array:
    """-1, 0 or 1; 0 of NaN, where NumPy's is NaN: what PyTorch has."""
    return (x > 0).astype(x.dtype) - (x < 0)
