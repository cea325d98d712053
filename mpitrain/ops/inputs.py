"""What operations do with their arguments before they begin: numbers, dtypes, dims, and NumPy's names for them."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.autograd.function import of_list
from mpitrain.backend import Array, is_array, is_float
from mpitrain.errors import ConfigError, MpitrainError, ShapeError

F = TypeVar("F", bound=Callable[..., Any])
Dims = int | Sequence[int] | None


def as_tensor(x: Any) -> Tensor:
    """`x`, or a tensor of it: numbers and lists become float32, arrays keep their dtype."""
    return x if isinstance(x, Tensor) else Tensor(of_list(x) if isinstance(x, list | tuple) else x)


def raw(x: Any) -> Any:
    """The array of a tensor; anything else as it is: what an op takes that no gradient flows into."""
    return x.array if isinstance(x, Tensor) else x


def fitting(name: str, number: Any, dtype: np.dtype[Any]) -> Any:
    """`number` as one of that dtype. ShapeError where it is none: 2.5 is no int64, 300 no int8, 1j no float32."""
    given = raw(number)
    try:
        given = given.item() if hasattr(given, "item") else given
        with np.errstate(over="ignore"):
            made = dtype.type(given)
            fits = made.item() == given or given != given or (dtype.kind in "fc" and bool(np.isfinite(made)))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        found = f"an array of shape {given.shape}" if is_array(given) else given
        raise ShapeError(f"{name}: the value {found} is no {dtype}; convert the array, or the value, first")
    return made


def check_number(name: str, what: str, value: Any) -> None:
    """ConfigError where `value` is no real number."""
    try:
        if isinstance(value, str):
            raise TypeError
        float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {what} is {value!r}, expected a number") from None


def as_array(x: Any) -> Array:
    return x if is_array(x) else as_tensor(x).array


def floating(name: str, x: Array) -> Array:
    """`x` with a dtype that has fractions: integers and booleans become float32, as in PyTorch (NumPy makes float16 of bytes)."""
    if x.dtype.kind == "c" or is_float(x.dtype):
        return x
    if x.dtype.kind not in "biu":
        raise ShapeError(f"{name}: the input is {x.dtype}, expected numbers")
    return x.astype("float32")


def float_tensor(name: str, x: Any) -> Tensor:
    """`x` as a tensor that has fractions; see `floating`."""
    x = as_tensor(x)
    return x if is_float(x.dtype) else Tensor(floating(name, x.array))


def only_floats(name: str, x: Any) -> Array:
    """The array of x. ShapeError where it is neither float32 nor float64: PyTorch has no such function of integers."""
    array = as_array(raw(x))
    if array.dtype.char not in "fd":
        raise ShapeError(f"{name}: the input is {array.dtype}, expected float32 or float64; convert it first")
    return array


def integers(name: str, x: Array, what: str = "index") -> Array:
    if x.dtype.kind not in "iu":
        raise ShapeError(f"{name}: the {what} is {x.dtype}, expected integers (int64)")
    return x


def dim_of(name: str, x: Any, dim: Any, extra: int = 0) -> int:
    """`dim` counted from 0; an array without dims has one for this, as in PyTorch. ShapeError where it is none of x's."""
    n = max(len(x.shape) + extra, 1)
    try:
        number = operator.index(dim if not isinstance(dim, bool) else None)    # type: ignore[arg-type]
    except TypeError:
        raise ShapeError(f"{name}: dim is {dim!r}, expected an integer") from None
    if not -n <= number < n:
        raise ShapeError(f"{name}: dim {number} of an array with {len(x.shape)} dims, shape {tuple(x.shape)}; "
                         f"expected {-n} ... {n - 1}")
    return number % n


def reduced(name: str, x: Any, dim: Dims) -> int | tuple[int, ...] | None:
    """`dims_of`, and None for all: the usual dim, one number, is left for the Function to check."""
    return dim if dim is None or (type(dim) is int and len(getattr(x, "shape", ()))) else dims_of(name, as_tensor(x), dim) or None


def dims_of(name: str, x: Any, dim: Dims) -> tuple[int, ...]:
    """All dims where `dim` is None or empty; else those it names, counted from 0, each once."""
    if dim is None or (isinstance(dim, Sequence) and not len(dim)):
        return tuple(range(len(x.shape)))
    found = tuple(dim_of(name, x, d) for d in (dim if isinstance(dim, Sequence) else (dim,)))
    if len(set(found)) < len(found):
        raise ShapeError(f"{name}: dims {tuple(dim) if isinstance(dim, Sequence) else dim} name one twice; name each once")
    return found if len(x.shape) else ()


def sizes_of(name: str, given: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given as numbers or as one sequence; ShapeError where one is no integer."""
    sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    try:
        return tuple(operator.index(n) for n in sizes)
    except TypeError:
        raise ShapeError(f"{name}: sizes are {sizes!r}, expected integers") from None


FAILURES = (MpitrainError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)   # of calls that are wrong


def door(function: F) -> F:
    """What users call: an op, which also takes NumPy's `axis` and `keepdims` for PyTorch's `dim` (or `dims`) and `keepdim`.

    A call that fails says so in one line (`mistakes.told`). Until then the door looks at nothing: operations call each other
    without it.
    """
    arguments = inspect.signature(function).parameters
    names = [(theirs, ours) for theirs, ours in (("axis", "dims" if "dims" in arguments else "dim"), ("keepdims", "keepdim"))
             if ours in arguments]

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for theirs, ours in names:
                if theirs in kwargs:
                    if ours in kwargs:
                        raise ShapeError(f"{function.__name__}: {ours} and {theirs} were both given; they mean the same")
                    kwargs[ours] = kwargs.pop(theirs)
        try:
            return function(*args, **kwargs)
        except FAILURES as error:
            from mpitrain.ops.mistakes import told  # few calls are wrong
            message = told(function, args, kwargs, error)
            if message is None:
                raise
            raise message from error
    return op  # type: ignore[return-value]
