"""Assignment: ``x[index] = values`` and ``x.copy_(values)``, in x's own memory, with the gradient of what was written."""

from __future__ import annotations

import itertools
from sys import getrefcount
from typing import Any

from mpitrain.autograd import Context, Function, Tensor, grad_enabled
from mpitrain.autograd.accumulate import ONE
from mpitrain.backend import Array, is_array, is_float
from mpitrain.errors import GraphError, ShapeError
from mpitrain.ops.choice import where
from mpitrain.ops.index import getitem, parted
from mpitrain.ops.inputs import as_tensor
from mpitrain.ops.shape import reshape

Place = tuple[tuple[Any, ...], tuple[Any, ...] | None]        # see `parted`
WHOLE: Place = ((Ellipsis,), None)


class Assign(Function):
    """x, whose memory has `values` at a place from here on. x is then another node than before, as if it were a new array."""

    complex_inputs = "analytic"
    broadcasts = views = True
    recorded = False                              # who runs the operations again would change arrays that are not theirs

    @staticmethod
    def forward(ctx: Context, x: Array, values: Array, *, place: Place) -> Array:
        _write(x, values, place)
        ctx.place = place
        return x

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_x = by_values = None
        if ctx.needs[0]:
            written = ctx.xp.zeros(grad.shape, bool)
            _write(written, True, ctx.place)
            by_x = where(written, grad.xp.zeros((), grad.dtype), grad)
        if ctx.needs[1]:
            first, chosen = ctx.place
            by_values = getitem(grad, first)
            by_values = by_values if chosen is None else getitem(by_values, chosen)
        return by_x, by_values


def _write(x: Array, values: Any, place: Place) -> None:
    first, chosen = place
    part = x[first if Ellipsis in first else (*first, Ellipsis)]      # a view, also of one number
    part[... if chosen is None else chosen] = values


def setitem(x: Tensor, index: Any, values: Any) -> None:
    """``x[index] = values``; see `assign`."""
    assign("x[...] = values", x, values, parted(x, index))


def copy_(x: Tensor, values: Any) -> Tensor:
    """Overwrites all of x, as ``x[...] = values`` does."""
    return assign("copy_", x, values, WHOLE)


def assign(name: str, x: Tensor, values: Any, place: Place) -> Tensor:
    """Writes `values`, of x's dtype then, in x's memory; recorded where x or they require a gradient.

    x is a result then: the gradient of what it holds goes to the values, and what it held before has none there. GraphError where
    x is a leaf that requires a gradient, or where other tensors show its memory, or operations keep it for backward: they would
    not know of the change. ShapeError where the place is none of x's, or the values do not fit in it.
    """
    values = values if isinstance(values, Tensor) or is_array(values) else _array(name, x, values)
    if values.dtype.kind not in "biufc" or (values.dtype.kind == "c" and x.dtype.kind != "c"):
        raise ShapeError(f"{name}: the values are {values.dtype}, the array is {x.dtype}; convert one of them first")
    if grad_enabled() and (x.requires_grad or (isinstance(values, Tensor) and values.requires_grad)):
        _record(name, x, as_tensor(values), place)
    else:
        try:
            _write(x.array, values.array if isinstance(values, Tensor) else values, place)
        except (TypeError, ValueError, IndexError, ArithmeticError) as error:
            raise ShapeError(f"{name}: {' '.join(str(error).split())}; the array is {x.dtype} {x.shape}, the values are "
                             f"{values.dtype} {values.shape}") from None
    x.mark_changed()
    return x


def _array(name: str, x: Tensor, values: Any) -> Array:
    """Numbers and lists of them in x's dtype; in one of integers, fractions are cut off, as PyTorch does."""
    parts = values if isinstance(values, list | tuple) else (values,)
    expected = "expected numbers, lists of equal lengths, or an array"
    try:
        if any(isinstance(part, Tensor) for part in parts):
            raise TypeError("a list has tensors, whose gradients it would lose; write ops.stack(values)")
        if any(part is None or isinstance(part, str) for part in parts):
            raise TypeError(f"{values!r} is no number")
        return x.xp.asarray(values, dtype=x.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ShapeError(f"{name}: {' '.join(str(error).split())}; {expected}") from None


def _record(name: str, x: Tensor, values: Tensor, place: Place) -> None:
    if x.edge is None and (x.requires_grad or x.is_parameter):
        raise GraphError(f"{name}: changing a leaf that requires a gradient in place is not recorded; compute a new one, or do "
                         "it under no_grad()")
    if x.dtype.kind != "c" and not is_float(x.dtype):
        raise ShapeError(f"{name}: the values require a gradient, and an array of {x.dtype} has none; convert it, or write "
                         "values.detach()")
    version = x.version
    if version is not None and getrefcount(version) > ONE + 1:        # more than this variable and x
        raise GraphError(f"{name}: a gradient would be lost, since other tensors (x[0], x.reshape) show the memory of this one, "
                         "or operations keep it for backward; read parts as x[0].clone(), or change a copy, x = x.clone()")
    if values.dtype != x.dtype:
        from mpitrain.ops.creation import astype  # most values need none
        values = astype(values, x.dtype)
    if values.shape[:1] == (1,):
        values = reshape(values, tuple(itertools.dropwhile(lambda n: n == 1, values.shape)))
    made = Assign.apply(x, values, place=place)
    made.node.__dict__.pop("beside", None)        # its derivative needs no inputs: the next assignment may change them
    x.edge, x.requires_grad = made.edge, True
