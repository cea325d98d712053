"""Questions and bits, element by element: no gradient flows through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.inputs import as_tensor, raw

__all__ = ["allclose", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
           "gcd", "heaviside", "isclose", "isfinite", "isin", "isinf", "isnan", "isneginf", "isposinf", "isreal", "lcm",
           "logical_and", "logical_not", "logical_or", "logical_xor", "signbit"]


class Plain(Function):
    """A function of arrays that no gradient flows through: `compute(xp, *arrays)`."""

    compute: Callable[..., Any]
    kinds = ""                                    # the kinds of numbers it takes, all where empty

    @staticmethod
    def forward(ctx: Context, *arrays: Any, **params: Any) -> Array:
        op = ctx.function
        if op.kinds:
            for a in arrays:
                if getattr(a, "dtype", None) is not None and a.dtype.kind not in op.kinds:
                    raise ShapeError(f"{op.__name__}: an input is {a.dtype}, expected integers"
                                     f"{' or booleans' if 'b' in op.kinds else ''}")
        try:
            return op.compute(ctx.xp, *arrays, **params)
        except ValueError:
            shapes = ", ".join(str(a.shape) for a in arrays if hasattr(a, "shape"))
            raise ShapeError(f"{op.__name__}: shapes {shapes} do not broadcast; each dim must be equal or 1") from None


def plain(name: str, compute: Callable[..., Any], doc: str, kinds: str = "") -> Callable[..., Tensor]:
    """An op of this name; see `Plain`."""
    function: Any = type(name, (Plain,), {"compute": staticmethod(compute), "kinds": kinds, "__doc__": doc})

    def op(x: Any, *others: Any, **params: Any) -> Tensor:
        return function.apply(raw(x) if others and isinstance(x, bool | int | float) else as_tensor(x).array,
                              *(raw(other) for other in others), **params)
    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


isnan = plain("isnan", lambda xp, x: xp.isnan(x), "True where x is NaN.")
isinf = plain("isinf", lambda xp, x: xp.isinf(x), "True where x is infinite.")
isfinite = plain("isfinite", lambda xp, x: xp.isfinite(x), "True where x is neither infinite nor NaN.")
isposinf = plain("isposinf", lambda xp, x: x == float("inf"), "True where x is +inf.")
isneginf = plain("isneginf", lambda xp, x: x == float("-inf"), "True where x is -inf.")
isreal = plain("isreal", lambda xp, x: xp.ones(x.shape, bool), "True: numbers here are real.")
signbit = plain("signbit", lambda xp, x: xp.signbit(x) if x.dtype.kind == "f" else x < 0,
                "True where x is below 0, or -0.0.")
logical_and = plain("logical_and", lambda xp, x, y: xp.logical_and(x, y), "True where both are not 0.")
logical_or = plain("logical_or", lambda xp, x, y: xp.logical_or(x, y), "True where one of them is not 0.")
logical_xor = plain("logical_xor", lambda xp, x, y: xp.logical_xor(x, y), "True where just one of them is not 0.")
logical_not = plain("logical_not", lambda xp, x: xp.logical_not(x), "True where x is 0.")
bitwise_and = plain("bitwise_and", lambda xp, x, y: x & y, "x & y, of integers or booleans.", "biu")
bitwise_or = plain("bitwise_or", lambda xp, x, y: x | y, "x | y, of integers or booleans.", "biu")
bitwise_xor = plain("bitwise_xor", lambda xp, x, y: x ^ y, "x ^ y, of integers or booleans.", "biu")
bitwise_not = plain("bitwise_not", lambda xp, x: ~x, "~x, of integers or booleans.", "biu")
bitwise_left_shift = plain("bitwise_left_shift", lambda xp, x, y: xp.left_shift(x, y), "x 2^y, of integers.", "iu")
bitwise_right_shift = plain("bitwise_right_shift", lambda xp, x, y: xp.right_shift(x, y), "floor(x / 2^y), of integers.", "iu")
gcd = plain("gcd", lambda xp, x, y: xp.gcd(x, y), "The greatest common divisor, of integers.", "iu")
lcm = plain("lcm", lambda xp, x, y: xp.lcm(x, y), "The least common multiple, of integers.", "iu")
heaviside = plain("heaviside", lambda xp, x, y: xp.where(x > 0, x.dtype.type(1), xp.where(x == 0, y, x.dtype.type(0))),
                  "0 where x is below 0, 1 above, and y where it is 0.")


def isclose(x: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """True where |x - other| <= atol + rtol |other|."""
    if rtol < 0 or atol < 0:
        raise ShapeError(f"isclose: rtol is {rtol} and atol {atol}, expected 0 or more")
    return _isclose(x, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


def _close(xp: Any, x: Array, y: Any, rtol: float, atol: float, equal_nan: bool) -> Array:
    if x.dtype.kind != "f":
        x = x.astype("float64")
    return xp.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)


_isclose = plain("isclose", _close, "")


def allclose(x: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """True where all elements are close; see `isclose`."""
    return bool(isclose(x, other, rtol, atol, equal_nan).array.all())


def isin(elements: Any, test_elements: Any, *, invert: bool = False) -> Tensor:
    """True where an element is one of `test_elements` (not one of them with `invert`)."""
    return _isin(elements, as_tensor(test_elements), invert=invert)


_isin = plain("isin", lambda xp, x, y, invert: xp.isin(x, y, invert=invert), "")
