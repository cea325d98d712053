"""New tensors, copies, and other dtypes. float32 where no dtype is given and none follows, as in PyTorch."""

from __future__ import annotations

import math
from numbers import Number
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, in_single
from mpitrain.autograd.analytic import Real
from mpitrain.backend import Array, array_module, is_array, is_half
from mpitrain.errors import ShapeError
from mpitrain.ops.inputs import as_array, as_tensor, raw, sizes_of

__all__ = ["arange", "astype", "clone", "contiguous", "eye", "full", "full_like", "linspace", "logspace", "new_full", "new_ones",
           "new_zeros", "ones", "ones_like", "tensor", "zeros", "zeros_like"]


def dtype_of(name: str, dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype that a name or a type says; ShapeError where it is none that tensors have."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "fiubc" or found.char in "egG":
        raise ShapeError(f"{name}: dtype is {dtype!r}, expected float32, float64, bool or integers such as int64")
    return found


class ToFloat32(Function):
    """Another dtype; the gradient comes back in the old one."""

    result_dtype: Any = np.dtype("float32")

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.kind = x.dtype
        return x.astype(ctx.function.result_dtype)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad.astype(ctx.kind)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return astype(grad, ctx.kind)


class ToFloat64(ToFloat32):
    result_dtype = np.dtype("float64")


class ToComplex64(Function):
    """Complex numbers of real ones, or of another precision; a real input has the real part of the gradient."""

    complex_inputs = "own"
    result_dtype: Any = np.dtype("complex64")

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.kind = x.dtype
        return x.astype(ctx.function.result_dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return astype(grad if ctx.kind.kind == "c" else Real.apply(grad), ctx.kind)


class ToComplex128(ToComplex64):
    result_dtype = np.dtype("complex128")


class ToWhole(Function):
    """Integers or booleans of numbers, or numbers that no operation takes: no gradient flows through it."""

    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, *, dtype: Any) -> Array:
        with np.errstate(invalid="ignore"):       # NaN as an integer is whatever the machine makes of it
            return x.astype(dtype)


CASTS = {kind.result_dtype.name: kind for kind in (ToFloat32, ToFloat64, ToComplex64, ToComplex128)}


class Clone(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        return x.copy()

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad


def astype(x: Any, dtype: Any) -> Tensor:
    """`x` in another dtype; gradients flow between those with fractions, complex ones too, none through integers or booleans.

    ShapeError where an imaginary part would be lost.
    """
    if isinstance(dtype, str) and dtype.split(":")[0] in ("cpu", "cuda"):
        raise ShapeError(f"to: {dtype!r} is a device, expected a dtype; a model and all it computes are on one device, "
                         "the one given to initialize() or train.device, and x.numpy() has the values on the host")
    x = as_tensor(x)
    if x.xp is not np:                            # 16 bits are on devices alone
        if isinstance(dtype, np.dtype) and is_half(dtype):
            return x if x.dtype == dtype else Function.cast(astype(x, "float32"), dtype=dtype)
        x = in_single(x)
    wanted = dtype_of("astype", dtype)
    if x.dtype == wanted:
        return x
    if wanted.name in CASTS and x.dtype.char not in "egG":        # there are no operations on these, only casts
        return CASTS[wanted.name].apply(x)
    if x.dtype.kind == "c" and wanted != "bool":
        raise ShapeError(f"astype: {x.dtype} to {wanted} would lose the imaginary part; convert x.real, or ops.real(x)")
    return ToWhole.apply(x.array, dtype=wanted)


def clone(x: Any) -> Tensor:
    """A copy of x in the graph: its gradient is x's."""
    return Clone.apply(as_tensor(x))


def contiguous(x: Any) -> Tensor:
    """`x` itself where its rows lie one after the other in memory, else a copy of which that is true."""
    x = as_tensor(x)
    return x if x.array.flags.c_contiguous else Clone.apply(x)


def tensor(data: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A new tensor of numbers or lists; the dtype that PyTorch gives them: int64 of integers, bool, complex64, else float32."""
    try:
        array = np.array(raw(data))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"tensor: {' '.join(str(error).split())}; expected numbers, or lists of equal lengths") from None
    if dtype is None:
        dtype = array.dtype if hasattr(data, "dtype") or array.dtype.kind in "biu" else "complex64" if (
            array.dtype.kind == "c") else "float32"
    wanted = dtype_of("tensor", dtype)
    if array.dtype.kind not in "fiubc" or (array.dtype.kind == "c" and wanted.kind not in "cb"):
        raise ShapeError(f"tensor: the numbers are {array.dtype}, which are no {wanted}")
    return Tensor(array.astype(wanted), requires_grad)


def zeros(*size: Any, dtype: Any = "float32") -> Tensor:
    """Zeros of that shape."""
    return Tensor(array_module().zeros(_shape("zeros", size), dtype_of("zeros", dtype)))


def ones(*size: Any, dtype: Any = "float32") -> Tensor:
    """Ones of that shape."""
    return Tensor(array_module().ones(_shape("ones", size), dtype_of("ones", dtype)))


def full(size: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    """That shape, filled with one value, whose type says the dtype where none is given."""
    fill_value = raw(fill_value)
    if not isinstance(fill_value, Number) and not (is_array(fill_value) and fill_value.size == 1):
        raise ShapeError(f"full: the value is {fill_value!r}, expected a number")
    return Tensor(array_module().full(_shape("full", (size,)), fill_value, _kind("full", dtype, fill_value)))


def eye(n: int, m: int | None = None, *, dtype: Any = "float32") -> Tensor:
    """The identity, of n rows and m columns."""
    if n < 0 or (m is not None and m < 0):
        raise ShapeError(f"eye: {n} rows and {m} columns, expected 0 or more")
    return Tensor(array_module().eye(n, m, dtype=dtype_of("eye", dtype)))


def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Tensor:
    """start, start + step, ... below `end`; from 0 where one number is given. int64 of integers."""
    start, end = (0, start) if end is None else (start, end)
    numbers = [n.item() if hasattr(n, "item") else n for n in (start, end, step)]
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) or not numbers[2] or (
            (numbers[1] - numbers[0]) * numbers[2] < 0):
        raise ShapeError(f"arange: from {start} to {end} by {step}: the numbers must be finite, and the step lead to the end")
    wanted = dtype_of("arange", dtype or ("int64" if all(isinstance(n, int) for n in numbers) else "float32"))
    if wanted.kind in "iu":
        numbers = [int(n) for n in numbers]
    count = max(math.ceil((numbers[1] - numbers[0]) / numbers[2]), 0)
    steps = array_module().arange(count, dtype="int64" if all(isinstance(n, int) for n in numbers) else "float64")
    return Tensor((numbers[0] + steps * numbers[2]).astype(wanted))


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = "float32") -> Tensor:
    """`steps` numbers from `start` to `end`, both included, equally far apart."""
    if not isinstance(steps, int | np.integer) or steps < 0:
        raise ShapeError(f"linspace: {steps!r} steps, expected an integer of 0 or more")
    if as_array(start).ndim or as_array(end).ndim:
        raise ShapeError(f"linspace: from {as_array(start).shape} to {as_array(end).shape}, expected two numbers")
    start, end = float(raw(start)), float(raw(end))
    wanted = dtype_of("linspace", dtype)
    made = np.linspace(start, end, steps, dtype="float64")
    return Tensor(made.astype(wanted))


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = "float32") -> Tensor:
    """`base` to the power of each number of `linspace`."""
    wanted = dtype_of("logspace", dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return Tensor(np.power(base, linspace(start, end, steps, dtype="float64").array).astype(wanted))


def zeros_like(x: Any, *, dtype: Any = None) -> Tensor:
    """Zeros of the shape and dtype of x."""
    return _like("zeros_like", x, None, 0, dtype)


def ones_like(x: Any, *, dtype: Any = None) -> Tensor:
    """Ones of the shape and dtype of x."""
    return _like("ones_like", x, None, 1, dtype)


def full_like(x: Any, fill_value: Any, *, dtype: Any = None) -> Tensor:
    """One value in the shape and dtype of x."""
    return _like("full_like", x, None, raw(fill_value), dtype)


def new_zeros(x: Any, *size: Any, dtype: Any = None) -> Tensor:
    """Zeros of that shape, in the dtype of x."""
    return _like("new_zeros", x, size, 0, dtype)


def new_ones(x: Any, *size: Any, dtype: Any = None) -> Tensor:
    """Ones of that shape, in the dtype of x."""
    return _like("new_ones", x, size, 1, dtype)


def new_full(x: Any, size: Any, fill_value: Any, *, dtype: Any = None) -> Tensor:
    """One value in that shape, in the dtype of x."""
    return _like("new_full", x, (size,), raw(fill_value), dtype)


def _like(name: str, x: Any, size: tuple[Any, ...] | None, value: Any, dtype: Any) -> Tensor:
    x = as_tensor(x)
    shape = x.shape if size is None else _shape(name, size)
    return Tensor(x.xp.full(shape, value, x.dtype if dtype is None else dtype_of(name, dtype)))


def _shape(name: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    shape = sizes_of(name, size)
    if any(n < 0 for n in shape):
        raise ShapeError(f"{name}: shape {shape}, expected sizes of 0 or more")
    return shape


def _kind(name: str, dtype: Any, value: Any) -> np.dtype[Any]:
    if dtype is not None:
        return dtype_of(name, dtype)
    if hasattr(value, "dtype"):
        return np.dtype(value.dtype)
    return np.dtype("bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32")
