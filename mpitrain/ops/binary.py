"""Functions of two numbers, element by element and broadcast: angles, remainders, logarithms of sums, bounds.

Each stands in one line: its value and its two slopes, expressions that arrays and tensors both take. Integers and booleans become
float32 where the result has fractions, as in PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_array
from mpitrain.errors import ShapeError
from mpitrain.kernels import elementwise as kernels
from mpitrain.ops.choice import clip
from mpitrain.ops.inputs import as_tensor, floating
from mpitrain.ops.unary import exp2

__all__ = ["addcdiv", "addcmul", "atan2", "clamp", "copysign", "floor_divide", "fmax", "fmin", "fmod", "hypot", "ldexp", "lerp",
           "logaddexp", "logaddexp2", "remainder", "trunc_divide", "xlog1py", "xlogy"]


class Binary(Function):
    """A function of two elements: `value(xp, x, y)`, and `by_x(module, x, y)` and `by_y`, what the gradient is multiplied by."""

    broadcasts = is_arithmetic = True
    value: Callable[[Any, Any, Any], Any]
    by_x: Callable[[Any, Any, Any], Any]
    by_y: Callable[[Any, Any, Any], Any]
    exact = divides = False                       # integers stay integers; and are divided by y

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        op = ctx.function
        name = op.__name__.lower()
        check_broadcast(name, x, y)
        if op.exact:
            if not any(is_array(a) and a.dtype.kind == "f" or isinstance(a, float) for a in (x, y)):
                if op.divides and not ctx.xp.all(ctx.xp.asarray(y) != 0):
                    raise ShapeError(f"{name}: an integer was divided by 0; integers have no infinity, convert them to floats")
                return op.value(ctx.xp, x, y)
        else:
            x, y = (floating(name, a) if is_array(a) else a for a in (x, y))
        ctx.save(x, y)
        return op.value(ctx.xp, x, y)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, y = ctx.saved
        op = ctx.function
        return (grad * op.by_x(ctx.xp, x, y) if ctx.needs[0] else None, grad * op.by_y(ctx.xp, x, y) if ctx.needs[1] else None)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, y, op, m = ctx.input(0), ctx.input(1), ctx.function, sys.modules[__package__]
        return grad * op.by_x(m, x, y) if ctx.needs[0] else None, grad * op.by_y(m, x, y) if ctx.needs[1] else None


def check_broadcast(name: str, *arrays: Any) -> None:
    """ShapeError where the shapes do not broadcast against each other."""
    shapes = [tuple(a.shape) for a in arrays if hasattr(a, "shape")]
    for place in range(1, max(map(len, shapes), default=0) + 1):
        if len({shape[-place] for shape in shapes if len(shape) >= place} - {1}) > 1:
            raise ShapeError(f"{name}: shapes {', '.join(map(str, shapes))} do not broadcast; dim {-place} must be equal or 1")


def binary(name: str, value: Callable[..., Any], by_x: Callable[..., Any], by_y: Callable[..., Any], doc: str, *,
           exact: bool = False, divides: bool = False) -> Callable[[Any, Any], Tensor]:
    """An op of this name; see `Binary`."""
    function: Any = type(name.capitalize(), (Binary,), {
        "value": staticmethod(value), "by_x": staticmethod(by_x), "by_y": staticmethod(by_y),
        "exact": exact or divides, "divides": divides, "__doc__": doc})

    def op(x: Any, y: Any) -> Tensor:
        return function.apply(*operands(x, y))
    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


def operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Numbers stay numbers beside a tensor, whose dtype counts."""
    if isinstance(x, int | float) and isinstance(y, int | float):
        return as_tensor(x), y
    return tuple(a if isinstance(a, int | float) else as_tensor(a) for a in (x, y))  # type: ignore[return-value]


def _nothing(m: Any, x: Any, y: Any) -> float:
    return 0.0


def _one(m: Any, x: Any, y: Any) -> float:
    return 1.0


def _over_squares(m: Any, number: Any, x: Any, y: Any) -> Any:
    """number / (x^2 + y^2), 0 where both are 0."""
    squares = x * x + y * y
    none = m.equal(squares, 0)
    return m.where(none, 0.0, number / m.where(none, 1.0, squares))


def _sign_kept(m: Any, x: Any, y: Any) -> Any:
    """copysign(x, y) / x, 0 where x is 0."""
    none = m.equal(x, 0)
    return m.where(none, 0.0, m.copysign(x, y) / m.where(none, 1.0, x))


def _is_first(m: Any, x: Any, y: Any, test: str) -> Any:
    """True where fmax or fmin takes x."""
    return m.logical_or(m.isnan(y), getattr(m, test)(y, x))


def _compiled(kernel: Any) -> Callable[..., Any]:
    """A kernel as a value, which NumPy computes where x is a number."""
    return lambda xp, x, y: kernel(x, y) if is_array(x) else getattr(xp, kernel.name)(x, y)


atan2 = binary("atan2", lambda xp, x, y: xp.arctan2(x, y), lambda m, x, y: _over_squares(m, y, x, y),
               lambda m, x, y: -_over_squares(m, x, x, y), "The angle of the point (y, x), in radians in (-pi, pi].")
hypot = binary("hypot", lambda xp, x, y: xp.hypot(x, y), lambda m, x, y: x / m.hypot(x, y),
               lambda m, x, y: y / m.hypot(x, y), "sqrt(x^2 + y^2) without overflow.")
logaddexp = binary("logaddexp", _compiled(kernels.logaddexp), lambda m, x, y: 1 / (1 + m.exp(y - x)),
                   lambda m, x, y: 1 / (1 + m.exp(x - y)), "log(exp(x) + exp(y)) without overflow.")
logaddexp2 = binary("logaddexp2", lambda xp, x, y: xp.logaddexp2(x, y), lambda m, x, y: 1 / (1 + m.exp2(y - x)),
                    lambda m, x, y: 1 / (1 + m.exp2(x - y)), "log2(2^x + 2^y) without overflow.")
remainder = binary("remainder", _compiled(kernels.remainder), _one, lambda m, x, y: -m.floor_divide(x, y),
                   "x - y floor(x / y), with the sign of y, as Python's %.", divides=True)
fmod = binary("fmod", _compiled(kernels.fmod), _one, lambda m, x, y: -m.trunc(x / y),
              "x - y trunc(x / y), with the sign of x, as C's fmod.", divides=True)
floor_divide = binary("floor_divide", lambda xp, x, y: xp.floor_divide(x, y), _nothing, _nothing,
                      "floor(x / y), as Python's //; the gradient is 0.", divides=True)
trunc_divide = binary("trunc_divide", lambda xp, x, y: _truncated(xp, x, y), _nothing, _nothing,
                      "x / y without what comes after the decimal point; the gradient is 0.", divides=True)
copysign = binary("copysign", lambda xp, x, y: xp.copysign(x, y), _sign_kept, _nothing, "|x| with the sign of y.")
xlogy = binary("xlogy", lambda xp, x, y: _product(xp, x, y, xp.log), lambda m, x, y: _factor(m, x, y, m.log, 0.0),
               lambda m, x, y: x / y, "x log(y), 0 where x is 0.")
xlog1py = binary("xlog1py", lambda xp, x, y: _product(xp, x, y, xp.log1p), lambda m, x, y: _factor(m, x, y, m.log1p, -1.0),
                 lambda m, x, y: x / (y + 1), "x log(1 + y), 0 where x is 0.")
fmax = binary("fmax", lambda xp, x, y: xp.fmax(x, y), lambda m, x, y: _is_first(m, x, y, "less_equal"),
              lambda m, x, y: m.logical_not(_is_first(m, x, y, "less_equal")),
              "The larger of x and y, the other one where one is NaN; the gradient goes to x where both are equal.", exact=True)
fmin = binary("fmin", lambda xp, x, y: xp.fmin(x, y), lambda m, x, y: _is_first(m, x, y, "greater_equal"),
              lambda m, x, y: m.logical_not(_is_first(m, x, y, "greater_equal")),
              "The smaller of x and y, the other one where one is NaN; the gradient goes to x where both are equal.", exact=True)


def _product(xp: Any, x: Any, y: Any, logarithm: Any) -> Any:
    """x logarithm(y) where x is not 0, or y is NaN."""
    none = (x == 0) & (y == y)
    return xp.where(none, 0, x * logarithm(xp.where(none, 1, y)).astype(getattr(y, "dtype", None) or x.dtype))


def _factor(m: Any, x: Any, y: Any, logarithm: Any, edge: float) -> Any:
    """logarithm(y); 0 where x is 0 and y at the edge or below, where the logarithm has no value."""
    none = m.logical_and(m.equal(x, 0), m.less_equal(y, edge))
    return m.where(none, 0.0, logarithm(m.where(none, edge + 1.0, y)))


def _truncated(xp: Any, x: Any, y: Any) -> Any:
    result = xp.floor_divide(abs(x), abs(y)) * xp.sign(x) * xp.sign(y)
    return result if result.dtype.kind in "iu" else xp.trunc(x / y)


def ldexp(x: Any, y: Any) -> Tensor:
    """x 2^y."""
    return as_tensor(x) * exp2(y)


def lerp(x: Any, end: Any, weight: Any) -> Tensor:
    """x + weight (end - x): a straight line from x (weight 0) to `end` (weight 1)."""
    x = as_tensor(x)
    return x + weight * (end - x)


def addcmul(x: Any, first: Any, second: Any, *, value: float = 1) -> Tensor:
    """x + value first second."""
    made = as_tensor(first) * second
    return as_tensor(x) + (made if value == 1 else made * value)


def addcdiv(x: Any, first: Any, second: Any, *, value: float = 1) -> Tensor:
    """x + value first / second."""
    made = as_tensor(first) / second
    return as_tensor(x) + (made if value == 1 else made * value)


class Clamp(Function):
    """Bounds that are tensors; `max` wins where it is below `min`."""

    broadcasts = True

    @staticmethod
    def forward(ctx: Context, x: Array, low: Any, high: Any) -> Array:
        check_broadcast("clamp", x, low, high)
        ctx.save(*(ctx.xp.asarray(a) for a in _chosen(ctx.xp, x, low, high)))
        result = x if low is None else ctx.xp.maximum(x, low)
        return result if high is None else ctx.xp.minimum(result, high)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return tuple(grad * chosen if needed else None for chosen, needed in zip(ctx.saved, ctx.needs))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return tuple(grad * Tensor(chosen.astype(grad.dtype)) if needed else None for chosen, needed in zip(ctx.saved, ctx.needs))


def _chosen(xp: Any, x: Array, low: Any, high: Any) -> tuple[Any, ...]:
    """Where the result is x, `low`, `high`."""
    if low is None:
        return x <= high, xp.zeros(1, bool), x > high
    if high is None:
        return x >= low, x < low, xp.zeros(1, bool)
    return (x >= low) & (x <= high), (x < low) & (low < high), (x > high) | (high < low)


def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """`x` limited to [min, max], numbers or tensors, either of them absent; the gradient goes to what was chosen, x at a tie."""
    if min is None and max is None:
        raise ShapeError("clamp: neither min nor max was given; give one of them")
    if all(bound is None or isinstance(bound, int | float) for bound in (min, max)):
        return clip(x, min, max)
    return Clamp.apply(as_tensor(x), *(bound if bound is None or isinstance(bound, int | float) else as_tensor(bound)
                                       for bound in (min, max)))

