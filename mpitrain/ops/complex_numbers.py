"""Complex numbers: made of real ones and taken apart again. Gradients are dL/dRe + i dL/dIm, PyTorch's convention.

Arithmetic, matmul, sums, shapes and indexing take complex64 and complex128 as they are (see `autograd/analytic.py`).
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.autograd.analytic import PAIRS, Complex, Conjugate, Imaginary, Real
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.inputs import as_tensor

__all__ = ["angle", "complex", "conj", "imag", "is_complex", "polar", "real", "view_as_complex", "view_as_real"]


def is_complex(x: Any) -> bool:
    return bool(as_tensor(x).dtype.kind == "c")


def complex(real: Any, imag: Any) -> Tensor:
    """real + i imag, of float32 or float64, which broadcast."""
    return Complex.apply(real, imag)


def to_complex(x: Any) -> Tensor:
    """x, as complex numbers: integers and booleans of float32."""
    x = as_tensor(x)
    if x.dtype.kind == "c":
        return x
    return Complex.apply(Tensor(x.array.astype("float32")) if x.dtype.kind in "biu" else x, 0.0)


def real(x: Any) -> Tensor:
    x = as_tensor(x)
    return Real.apply(x) if x.dtype.kind == "c" else x


def imag(x: Any) -> Tensor:
    """The imaginary part; ShapeError of what is not complex."""
    return Imaginary.apply(_complex("imag", x))


def conj(x: Any) -> Tensor:
    x = as_tensor(x)
    return Conjugate.apply(x) if x.dtype.kind == "c" else x


def angle(x: Any) -> Tensor:
    """The argument in radians, from -pi to pi; of real numbers 0, or pi where negative."""
    x = as_tensor(x)
    return (Angle if x.dtype.kind == "c" else RealAngle).apply(x)


def polar(abs: Any, angle: Any) -> Tensor:
    """absolute (cos angle + i sin angle)."""
    from mpitrain.ops.unary import cos, sin
    return Complex.apply(abs * cos(angle), abs * sin(angle))


def view_as_real(x: Any) -> Tensor:
    """(..., 2), real and imaginary parts, of complex x (...)."""
    return AsReal.apply(_complex("view_as_real", x))


def view_as_complex(x: Any) -> Tensor:
    """Complex (...) of x (..., 2): the inverse of `view_as_real`."""
    x = as_tensor(x)
    if x.ndim == 0 or x.shape[-1] != 2 or x.dtype.char not in "fd":
        raise ShapeError(f"view_as_complex: the input is {x.dtype} of shape {x.shape}, expected float32 or float64 (..., 2)")
    return AsComplex.apply(x)


def _complex(name: str, x: Any) -> Tensor:
    x = as_tensor(x)
    if x.dtype.kind != "c":
        raise ShapeError(f"{name}: the input is {x.dtype}, expected complex numbers; make them with ops.complex")
    return x


class AsReal(Function):
    complex_inputs = "own"
    views = True

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        return ctx.xp.ascontiguousarray(z[..., None]).view(z.real.dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return AsComplex.apply(grad)


class AsComplex(Function):
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        return ctx.xp.ascontiguousarray(x).view(PAIRS[x.dtype.char])[..., 0]

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return AsReal.apply(grad)


class Magnitude(Function):
    """|z|; the gradient is that of the result times z / |z|, 0 where z is 0."""

    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        result = ctx.xp.abs(z)
        ctx.save(z, result)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        z, size = ctx.input(0), ctx.output(0)
        one = size.dtype.type(1)
        return grad * (z / (size + Tensor((size.array == 0) * one)))


class Angle(Function):
    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        ctx.save(z)
        return ctx.xp.angle(z)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        z = ctx.input(0)
        squared = real(z * conj(z))
        squared = squared + Tensor((squared.array == 0) * squared.dtype.type(1))
        return Complex.apply(-grad * imag(z) / squared, grad * real(z) / squared)


class RealAngle(Function):
    """0, or pi where x is negative; NaN of NaN. Its slope is 0."""

    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        return ctx.xp.where(x != x, x, (x < 0) * x.dtype.type(ctx.xp.pi))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * 0.0
