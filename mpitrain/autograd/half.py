"""Floats of 16 bits, on devices alone: which operations take them, and what stands in for those that do not.

`Function.half` says what an operation does with inputs of 16 bits, which are all of one format:

    ""              It gets float32, and its results are rounded: what is right for every expression, and costs a pass each way.
    "own"           It takes them as they are; a result that comes out wider is rounded.
    "products"      The same, and inputs of float32 beside them are rounded first, as the operands of products are.
    "parameters"    The same as "own", beside parameters and constants of float32 (gains and biases of norms).
    "loss"          It takes them as they are, and results stay float32.
    "any"           Inputs and results are whatever they are: it is no arithmetic (recomputation, hooks, messages).

Numbers without dims stay float32: they are sums over all elements, such as losses. As with PyTorch's autocast, a tensor of
float32 that was computed makes the result float32. Parameters, constants, and tensors without dims do not: they are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array, is_half
from mpitrain.errors import ShapeError

if TYPE_CHECKING:
    from mpitrain.autograd.context import Context

SINGLE = np.dtype("float32")


def takes_as_they_are(function: Any, half: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether an operation computes with these inputs, of which some have the 16-bit dtype `half`, as they are."""
    way = function.half
    if way in ("", "any"):
        return way == "any"
    return not any(dtype is not None and dtype != half and not (way == "parameters" and _follows(x, dtype))
                   for x, dtype in ((x, _format(x)) for x in inputs))


def mixed(function: Any, first: Any, second: Any) -> Any:
    """The format of an operation on both. ShapeError, but beside 16 bits, where `takes_as_they_are` has been asked."""
    if is_half(first):
        return first
    raise ShapeError(f'{function.__name__}: inputs of {first} and {second}; convert one of them first, as in '
                     f'x.to("{max(first, second)}"); integers and masks times a number are float32, but mask.to("float64") * 1e3')


def apply_around(function: Any, half: Any, inputs: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """The operation on inputs of one format: of 16 bits where it wants that of all, else float32, and its results rounded."""
    formats, cast = [_format(x) for x in inputs], function.cast
    for dtype in formats:
        if dtype is not None and dtype not in (half, SINGLE):
            _refuse(function, half, dtype)
    promotes = any(dtype == SINGLE and not _follows(x, dtype) for x, dtype in zip(inputs, formats))
    if function.half == "products" or (function.half and not promotes):
        return function.apply(*[cast(x, dtype=half) if dtype == SINGLE else x for x, dtype in zip(inputs, formats)], **params)
    result = function.apply(*[cast(x, dtype=SINGLE) if dtype == half else x for x, dtype in zip(inputs, formats)], **params)
    if promotes or function.half == "loss":
        return result
    several = isinstance(result, tuple)
    made = [cast(x, dtype=half) if x.dtype == SINGLE and x.ndim else x for x in (result if several else (result,))]
    return tuple(made) if several else made[0]


def result_beside(ctx: Context, value: Array, wanted: Any) -> Array:
    """A result in the format that it has beside inputs of 16 bits, `wanted`; saved as it is handed out."""
    way = ctx.function.half
    if way == "any":
        return value
    made = value.astype(SINGLE if way == "loss" or value.ndim == 0 else wanted, copy=False)
    if ctx._saved:
        ctx._saved = [made if kept is value else kept for kept in ctx._saved]
    return made


def gradient_dtype(edge: Any, dtype: Any) -> Any:
    """The format of the gradient of what has this dtype and this edge: float32 of parameters, whose `array` may be a copy."""
    return SINGLE if is_half(dtype) and type(edge) is not tuple and edge is not None and edge.is_parameter else dtype


def in_format(grad: Array, dtype: Any) -> Array:
    """A gradient in another format, where one of the two has 16 bits; else itself."""
    return grad.astype(dtype) if grad.dtype != dtype and (is_half(dtype) or is_half(grad.dtype)) else grad


def _format(x: Any) -> Any:
    """The dtype of a tensor or an array of floats, None for anything else."""
    dtype = x.dtype if isinstance(x, Tensor) or is_array(x) else None
    return dtype if dtype is not None and (dtype.kind == "f" or is_half(dtype)) else None


def _follows(x: Any, dtype: Any) -> bool:
    """Whether an input of float32 takes the format of what stands beside it."""
    return dtype == SINGLE and (not isinstance(x, Tensor) or x.is_leaf_of_model or x.ndim == 0)


def _refuse(function: Any, first: Any, second: Any) -> NoReturn:
    raise ShapeError(f"{function.__name__}: inputs of {first} and {second}; convert one of them first")
