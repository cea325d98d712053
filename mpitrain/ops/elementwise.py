"""Arithmetic with broadcasting, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_array
from mpitrain.ops.choice import signs, where
from mpitrain.ops.comparison import equal

__all__ = ["absolute", "add", "divide", "exp", "log", "multiply", "negative", "power", "sqrt", "subtract"]


class Add(Function):
    half = "own"
    complex_inputs = "analytic"
    broadcasts = is_arithmetic = True

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        return x + y

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return grad, grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return grad, grad


class Subtract(Function):
    half = "own"
    complex_inputs = "analytic"
    broadcasts = is_arithmetic = True

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        return x - y

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return grad, -grad if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return grad, -grad if ctx.needs[1] else None


class Multiply(Function):
    half = "own"
    complex_inputs = "analytic"
    broadcasts = is_arithmetic = True

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        ctx.save(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, y = ctx.saved
        return grad * y if ctx.needs[0] else None, grad * x if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.input(1) if ctx.needs[0] else None, grad * ctx.input(0) if ctx.needs[1] else None


class Divide(Function):
    half = "own"
    complex_inputs = "analytic"
    broadcasts = makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        result = x / y
        ctx.save(y, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        y, result = ctx.saved
        by_x = grad / y
        return by_x, -by_x * result if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_x = grad / ctx.input(1)
        return by_x, -by_x * ctx.output() if ctx.needs[1] else None


class Power(Function):
    complex_inputs = "analytic"
    broadcasts = is_arithmetic = True

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any) -> Array:
        result = x ** y
        ctx.save(x, y, result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, y, result = ctx.input(0), ctx.input(1), ctx.output()
        by_x = by_y = None
        if ctx.needs[0]:
            if isinstance(y, int | float):
                if y == 0.5:                      # 1 / sqrt(-0.0) is -inf, as PyTorch has it; (-0.0) ** -0.5 is inf
                    by_x = grad * (0.5 / sqrt(x))
                else:
                    by_x = grad * (y * x ** (y - 1)) if y != 0 else Tensor(ctx.xp.zeros(grad.shape, grad.dtype))
            else:
                # where y is 0, the derivative is 0 also at x = 0, so the exponent must not become -1 there
                zero = equal(y, 0)
                by_x = grad * y * where(zero, 0, x) ** where(zero, 1, y - 1)
        if ctx.needs[1]:
            # these contribute nothing: the limit of x**y log(x) for y > 0
            base, exponent = (a.array if isinstance(a, Tensor) else a for a in (x, y))
            zero = (base == 0) & (exponent >= 0)
            by_y = grad * where(zero, 0, result * log(where(zero, result.dtype.type(1), x)))
        return by_x, by_y


class Negative(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        return -x

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return -grad


class Absolute(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return ctx.xp.abs(x)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * signs(ctx.input(0).array)


class Exp(Function):
    complex_inputs = "analytic"
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = ctx.xp.exp(x)
        ctx.save(result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * ctx.output()


class Log(Function):
    complex_inputs = "analytic"
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return ctx.xp.log(x)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad / ctx.input(0)


class Sqrt(Function):
    complex_inputs = "analytic"
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = ctx.xp.sqrt(x)
        ctx.save(result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad / (2 * ctx.output())


def _of_one(function: type[Function]) -> Callable[[Any], Tensor]:
    def op(x: Any) -> Tensor:
        return function.apply(x)
    op.__name__ = op.__qualname__ = function.__name__.lower()
    return op


def _of_two(function: type[Function]) -> Callable[[Any, Any], Tensor]:
    def op(x: Any, y: Any) -> Tensor:
        return function.apply(x, y)
    op.__name__ = op.__qualname__ = function.__name__.lower()
    return op


add, subtract, multiply, divide = map(_of_two, (Add, Subtract, Multiply, Divide))
negative, exp, log, sqrt = map(_of_one, (Negative, Exp, Log, Sqrt))


def absolute(x: Any) -> Tensor:
    """|x|; of complex numbers sqrt(Re^2 + Im^2), with PyTorch's gradient: 0 at 0."""
    if is_array(array := x.array if isinstance(x, Tensor) else x) and array.dtype.kind == "c":
        from mpitrain.ops.complex_numbers import Magnitude
        return Magnitude.apply(x)
    return Absolute.apply(x)


def power(x: Any, y: Any) -> Tensor:
    """``x ** y``; the gradient of the exponent wants x >= 0, and is 0 where x = 0 and y >= 0."""
    return Power.apply(x, y)
