"""What a call that failed says in one line: read where one has failed."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from numbers import Number
from types import MethodType, TracebackType
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import is_array
from mpitrain.errors import ArgumentError, MpitrainError, ShapeError
from mpitrain.ops.pytorch import ARGUMENTS, OPERATIONS

OURS, LIBRARIES = "mpitrain", {"numpy", "cupy", "opt_einsum", *sys.stdlib_module_names}
SHOWN = 40                                        # characters of an argument that is no array
MISSING = re.compile(r"'([\w.]+)' object has no attribute '(?:shape|dtype|ndim|size|array|astype|reshape|numel)'")


def told(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
         error: Exception) -> MpitrainError | None:
    """The error to raise in place of what a call of `function` raised; None where a line of a user's own failed."""
    if isinstance(error, MpitrainError):
        error.args = (" ".join(error.message.split()), *error.args[1:])       # An array's text has several lines.
        return None
    name = type(function.__self__).__name__ if isinstance(function, MethodType) else \
        type(args[0]).__name__ if function.__name__ == "__call__" else function.__name__
    assert error.__traceback__ is not None
    inside = error.__traceback__.tb_next
    if inside is None:
        return misfit(name, function, error) if isinstance(error, TypeError) else None
    if _is_users(inside):
        return None
    given = _given(function, args, kwargs)
    lacking = MISSING.search(str(error))
    for argument, value in given.items() if lacking else ():
        if lacking and type(value).__name__ == lacking[1]:
            way = "give one" if value is None else "give its .data" if hasattr(value, "batch_sizes") else \
                "make a Tensor of it first: Tensor(x)"
            return ShapeError(f"{name}: {argument} is {_shown(value)}, expected a Tensor or an array; {way}")
    found = ", ".join(f"{argument}={_shown(value)}" for argument, value in given.items())
    return ShapeError(f"{name}: {' '.join(str(error).split())}; expected other arguments than {found}")


def misfit(name: str, function: Callable[..., Any], error: TypeError) -> ArgumentError:
    """What to say where the arguments are not those of the function."""
    text = re.sub(r"^\S*\(\) ?", "", str(error))
    asked = re.search(r"keyword argument '(\w+)'", text)
    hints = [ARGUMENTS.get(asked[1], "").replace("NAME", name) if asked else "", OPERATIONS.get(name, "")]
    arguments = ", ".join(argument for argument in inspect.signature(function).parameters if argument != "self")
    return ArgumentError("; ".join([f"{name}: {text}", f"its arguments are ({arguments})", *filter(None, hints)]))


def _is_users(frames: TracebackType | None) -> bool:
    """Whether any line on the way to the failure is neither this package's nor a library's."""
    while frames is not None:
        module = frames.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if module != OURS and module not in LIBRARIES:
            return True
        frames = frames.tb_next
    return False


def _given(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    return {argument: value for argument, value in bound.items() if argument != "self"}


def _shown(value: Any) -> str:
    array = value.array if isinstance(value, Tensor) and (not value.is_parameter or hasattr(value, "array")) else value
    if is_array(array):
        return f"{array.dtype} {tuple(array.shape)}"
    if value is None or isinstance(value, (Number, str, np.generic)):
        return repr(value)[:SHOWN]
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
