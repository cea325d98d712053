"""Values where a mask is True, filled, chosen and put; classes as masks."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.ops.choice import where
from mpitrain.ops.creation import astype
from mpitrain.ops.index import getitem
from mpitrain.ops.inputs import as_array, as_tensor, fitting, integers
from mpitrain.ops.scattering import Put, _rows_index, within
from mpitrain.ops.shape import broadcast_to, reshape

__all__ = ["index_fill", "masked_fill", "masked_scatter", "masked_select", "one_hot"]


def index_fill(x: Any, dim: int, index: Any, value: Any) -> Tensor:
    """A copy of x whose rows `index` along `dim` are filled with one value."""
    x = as_tensor(x)
    dim, index = _rows_index("index_fill", x, dim, index)
    chosen = x.xp.zeros(x.shape[dim] if x.ndim else 1, bool)
    chosen[index] = True
    return masked_fill(x, chosen.reshape((-1,) + (1,) * (x.ndim - 1 - dim) if x.ndim else ()), value)


def _mask(name: str, x: Tensor, mask: Any) -> tuple[Tensor, Array]:
    """x and the mask, broadcast against each other."""
    mask = as_array(mask)
    if mask.dtype.kind != "b":
        raise ShapeError(f"{name}: the mask is {mask.dtype}, expected bool")
    shapes = [(1,) * (max(x.ndim, mask.ndim) - a.ndim) + tuple(a.shape) for a in (x, mask)]
    if any(a != b and 1 not in (a, b) for a, b in zip(*shapes)):
        raise ShapeError(f"{name}: a mask of shape {mask.shape} does not broadcast with shape {x.shape}")
    shape = tuple(b if a == 1 else a for a, b in zip(*shapes))
    return (x if x.shape == shape else broadcast_to(x, shape)), x.xp.broadcast_to(mask, shape)


def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """`value`, a number or a tensor without dims, where `mask` is True, else x; the dtype is x's, which must have the value."""
    x, mask = _mask("masked_fill", as_tensor(x), mask)
    if not isinstance(value, bool | int | float | complex) and as_tensor(value).ndim:
        raise ShapeError(f"masked_fill: a value of shape {as_tensor(value).shape}, expected a number; use where")
    if isinstance(value, Tensor) and value.requires_grad:
        return where(mask, astype(value, x.dtype), x)
    return where(mask, fitting("masked_fill", value, x.dtype), x)


def masked_select(x: Any, mask: Any) -> Tensor:
    """The values where `mask` is True, in one dim."""
    x, mask = _mask("masked_select", as_tensor(x), mask)
    return getitem(x, mask)


def masked_scatter(x: Any, mask: Any, source: Any) -> Tensor:
    """A copy of x with the values of `source`, in their order, where `mask` is True."""
    x, mask = _mask("masked_scatter", as_tensor(x), mask)
    source, count = as_tensor(source), int(mask.sum())
    if source.size < count:
        raise ShapeError(f"masked_scatter: {source.size} values for {count} places; expected as many at least")
    return Put.apply(x, reshape(source, -1)[:count], index=(mask,))


def one_hot(x: Any, num_classes: int = -1) -> Tensor:
    """int64 (..., C): 1 at the class that the integer says, else 0; C is the largest one + 1 where it is not given."""
    index = integers("one_hot", as_array(x), "input")
    if num_classes < 0:
        if not index.size:
            raise ShapeError("one_hot: the number of classes cannot be told of no labels; give num_classes")
        num_classes = int(index.max()) + 1
    within("one_hot", index, num_classes)
    return Tensor((index[..., None] == array_module(index).arange(num_classes)).astype("int64"))
