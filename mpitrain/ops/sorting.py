"""Sorting, ranks and places. Gradients flow back to where the values came from; equal values stay in their order."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines as kernels
from mpitrain.ops.choice import places
from mpitrain.ops.inputs import as_array, as_tensor, dim_of, integers
from mpitrain.ops.results import Places
from mpitrain.ops.scattering import gather, places_of
from mpitrain.ops.shape import reshape, squeeze, stack

__all__ = ["argsort", "argwhere", "bincount", "bucketize", "kthvalue", "median", "msort", "nanmedian", "nanquantile", "nonzero",
           "quantile", "searchsorted", "sort", "topk", "unique", "unique_consecutive"]


def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Places:
    """The values along `dim` in order, and where they came from (int64); NaN counts as the largest. Always stable."""
    x = as_tensor(x)
    dim = dim_of("sort", x, dim)
    if not x.ndim:
        return Places(x + 0, Tensor(x.xp.zeros((), "int64")))
    places = places_of(kernels.order, (x.array,), dim, descending)
    return Places(gather(x, dim, places), Tensor(places))


def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Where the values of `sort` come from (int64)."""
    x = as_tensor(x)
    dim = dim_of("argsort", x, dim)
    return Tensor(places_of(kernels.order, (x.array,), dim, descending) if x.ndim else x.xp.zeros((), "int64"))


def msort(x: Any) -> Tensor:
    """The values along dim 0 in order."""
    return sort(x, 0)[0]


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Places:
    """The k largest (or smallest) values along `dim` in order, and where they are (int64); the first ones of equal values."""
    x = as_tensor(x)
    dim = dim_of("topk", x, dim)
    n = x.shape[dim] if x.ndim else 1
    k = int(k)
    if not 0 <= k <= n:
        raise ShapeError(f"topk: k is {k}, and dim {dim} of shape {x.shape} has {n} values")
    if not x.ndim:
        return Places(x + 0 if k else reshape(x, 1)[:0], Tensor(x.xp.zeros(() if k else 0, "int64")))
    places = x.xp.moveaxis(places_of(kernels.extreme, (x.xp.moveaxis(x.array, dim, -1),), k, largest), -1, dim)
    return Places(gather(x, dim, places), Tensor(places))


def _at_rank(name: str, x: Tensor, dim: Any, keepdim: bool, rank: Any) -> Places:
    """The value of that rank along `dim`, and its place; `rank` is a number, or an array with a place for each."""
    dim = dim_of(name, x, dim)
    if not x.ndim:
        return Places(x + 0, Tensor(x.xp.zeros((), "int64")))
    shape = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    ranks = x.xp.broadcast_to(x.xp.asarray(rank, dtype="int64"), shape)
    last = tuple(x.xp.moveaxis(a, dim, -1) for a in (x.array, ranks))
    places = x.xp.moveaxis(places_of(kernels.place_of_rank, last), -1, dim)
    values = gather(x, dim, places)
    return Places(values, Tensor(places)) if keepdim else Places(squeeze(values, dim), Tensor(places.squeeze(dim)))


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Places:
    """The k-th smallest value along `dim`, from 1 on, and where it is (int64)."""
    x = as_tensor(x)
    n = x.shape[dim_of("kthvalue", x, dim)] if x.ndim else 1
    if not 1 <= k <= n:
        raise ShapeError(f"kthvalue: k is {k}, expected 1 ... {n}, the values along dim {dim} of shape {x.shape}")
    return _at_rank("kthvalue", x, dim, keepdim, k - 1)


def _middle(name: str, x: Any, dim: int | None, keepdim: bool, nan_wins: bool) -> Any:
    x = as_tensor(x)
    flat = x if dim is not None else reshape(x, x.size)
    at = dim_of(name, flat, 0 if dim is None else dim)
    n = flat.shape[at] if flat.ndim else 1
    if not n:
        raise ShapeError(f"{name} over no elements: shape {x.shape}, dim {dim}")
    rank: Any = (n - 1) // 2
    if flat.ndim and is_float(flat.dtype):
        missing = (flat.array != flat.array).sum(axis=at, keepdims=True)
        rank = x.xp.where(missing > 0, n - missing, rank) if nan_wins else x.xp.maximum((n - missing - 1) // 2, 0)
    values, places = _at_rank(name, flat, at, keepdim and dim is not None, rank)
    return values if dim is None else Places(values, places)


def median(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The value in the middle, the lower one of two; with `dim` also where it is (int64). NaN where one is NaN."""
    return _middle("median", x, dim, keepdim, True)


def nanmedian(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """`median` of what is not NaN."""
    return _middle("nanmedian", x, dim, keepdim, False)


def _quantiles(name: str, x: Any, q: Any, dim: int | None, keepdim: bool, interpolation: str, ignore_nan: bool) -> Tensor:
    x, given = as_tensor(x), as_tensor(q)
    given = given if isinstance(q, Tensor) or given.dtype == x.dtype else Tensor(given.array.astype(x.dtype))
    q = given.array
    if interpolation not in ("linear", "lower", "higher", "midpoint", "nearest") or q.ndim > 1 or not is_float(x.dtype) or (
            q.size and not (float(q.min()) >= 0 and float(q.max()) <= 1)):
        raise ShapeError(f'{name}: q {q.tolist()} of {x.dtype} by {interpolation!r}; expected numbers in 0 ... 1, of floats, by '
                         '"linear", "lower", "higher", "midpoint" or "nearest"')
    shape = x.shape
    flat = reshape(x, x.size) if dim is None or not x.ndim else x
    keepdim = keepdim and bool(shape)
    at = 0 if dim is None else dim_of(name, flat, dim)
    if not flat.shape[at]:
        raise ShapeError(f"{name} over no elements: shape {shape}, dim {dim}")
    xp, ordered = x.xp, sort(flat, at)[0]
    missing = (flat.array != flat.array).sum(axis=at, keepdims=True)
    last = flat.shape[at] - 1 - (missing if ignore_nan else 0 * missing)
    rows = []
    for i, number in enumerate(q.reshape(-1).tolist()):
        steps = xp.maximum(last, 0).astype(x.dtype)
        place = number * steps
        if not ignore_nan:
            place = xp.where(missing > 0, flat.shape[at] - 1, place).astype(x.dtype)
        if interpolation == "nearest":
            place = xp.rint(place)
        below, above = xp.floor(place).astype("int64"), xp.ceil(place).astype("int64")
        low, high = gather(ordered, at, below), gather(ordered, at, above)
        weight: Any = 0.5
        if interpolation == "linear":
            weight = (reshape(given, given.size)[i] * steps if given.requires_grad else place) - below.astype(x.dtype)
        rows.append(low if interpolation in ("lower", "nearest") else high if interpolation == "higher"
                    else low + (high - low) * weight)
    if keepdim:
        rows = [reshape(row, (1,) * len(shape)) if dim is None else row for row in rows]
    else:
        rows = [squeeze(row, at) if flat.ndim else row for row in rows]
    return rows[0] if q.ndim == 0 else stack(rows, 0)


def quantile(x: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear") -> Tensor:
    """The value below which a share q of the values lies; several q make a new first dim. NaN where one is NaN."""
    return _quantiles("quantile", x, q, dim, keepdim, interpolation, False)


def nanquantile(x: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear") -> Tensor:
    """`quantile` of what is not NaN."""
    return _quantiles("nanquantile", x, q, dim, keepdim, interpolation, True)


def unique(x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    """The different values in order (slices along `dim`); also where each went, and how often it is there. No gradient."""
    x = as_tensor(x)
    if dim is not None:
        dim = dim_of("unique", x, dim)
        if x.size == 0:
            raise ShapeError(f"unique: no slices of shape {x.shape} along dim {dim} can be compared")
    found, inverse, counts = x.xp.unique(x.array, return_inverse=True, return_counts=True, axis=dim if x.ndim else None)
    inverse = inverse.reshape(x.shape if dim is None else -1)
    return _answers(found, inverse, counts, return_inverse, return_counts)


def unique_consecutive(x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    """`unique` of neighbours alone, in the order in which they come."""
    x = as_tensor(x)
    xp, shape = x.xp, x.shape
    values = x.array.reshape(-1) if dim is None or not x.ndim else xp.moveaxis(x.array, dim_of("unique_consecutive", x, dim), 0)
    rows = values.reshape(len(values), -1) if values.size else values.reshape(len(values), 1 if values.ndim == 1 else 0)
    new = xp.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    starts = xp.nonzero(new)[0]
    inverse = xp.cumsum(new) - 1
    counts = xp.diff(xp.concatenate([starts, xp.asarray([len(rows)])]))
    found = values[starts]
    if dim is None or not x.ndim:
        return _answers(found, inverse.reshape(shape), counts, return_inverse, return_counts)
    return _answers(xp.moveaxis(found, 0, dim), inverse, counts, return_inverse, return_counts)


def _answers(found: Array, inverse: Array, counts: Array, return_inverse: bool, return_counts: bool) -> Any:
    made = [Tensor(found)]
    if return_inverse:
        made.append(Tensor(inverse.astype("int64")))
    if return_counts:
        made.append(Tensor(counts.astype("int64")))
    return made[0] if len(made) == 1 else tuple(made)


def searchsorted(sorted_sequence: Any, values: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
                 sorter: Any = None) -> Tensor:
    """Where each value would be put into a sorted sequence, before equal ones, or after them with `right`; rows of both match."""
    edges, wanted = as_array(sorted_sequence), as_array(values)
    side = side or ("right" if right else "left")
    if (side == "left" and right) or side not in ("left", "right"):
        raise ShapeError(f'searchsorted: side {side!r} and right={right}; expected "left" or "right", and both alike')
    xp = as_tensor(edges).xp
    if sorter is not None:
        edges = xp.take_along_axis(edges, integers("searchsorted", as_array(sorter), "sorter"), axis=-1)
    kind = "int32" if out_int32 else "int64"
    if edges.ndim == 1:
        return Tensor(xp.asarray(xp.searchsorted(edges, wanted, side=side)).astype(kind))
    if edges.ndim == 0 or edges.shape[:-1] != wanted.shape[:-1]:
        raise ShapeError(f"searchsorted: sequences of shape {edges.shape} for values of shape {wanted.shape}; all but the last "
                         "dim must be equal, or the sequence have one dim")
    rows, asked = edges.reshape(-1, edges.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    found = [xp.searchsorted(a, b, side=side) for a, b in zip(rows, asked)]
    return Tensor((xp.stack(found) if found else xp.zeros(asked.shape)).reshape(wanted.shape).astype(kind))


def bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """The number of the bucket that each value is in, between sorted boundaries; see `searchsorted`."""
    if as_array(boundaries).ndim != 1:
        raise ShapeError(f"bucketize: boundaries of shape {as_array(boundaries).shape}, expected one dim")
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """How often each integer from 0 on is there (int64), or the sum of its weights. No gradient."""
    values = integers("bincount", as_array(x), "input")
    if values.ndim != 1 or (values.size and int(values.min()) < 0) or minlength < 0:
        raise ShapeError(f"bincount: an input of shape {values.shape}; expected one dim, of integers of 0 or more")
    xp, weights = as_tensor(x).xp, None if weights is None else as_array(weights)
    made = xp.bincount(values, weights, minlength)
    return Tensor(made.astype("int64" if weights is None else weights.dtype if weights.dtype.kind == "f" else "float64"))


def nonzero(x: Any, *, as_tuple: bool = False) -> Any:
    """int64 (N, ndim): the places of all elements that are not 0, in order; with `as_tuple` one tensor for each dim."""
    x = as_tensor(x)
    found = places(x)
    if as_tuple:
        return found
    made = x.xp.stack([p.array for p in found], axis=1)
    return Tensor(made if x.ndim else made[:, :0])


def argwhere(x: Any) -> Tensor:
    """`nonzero`, under NumPy's name."""
    return nonzero(x)
