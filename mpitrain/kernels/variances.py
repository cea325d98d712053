"""Means, and sums of squared distances from them: in float64 whatever the numbers are, first the means, then the squares."""

from __future__ import annotations

from math import prod

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host
from mpitrain.kernels.sums import BLOCK


def _sums(x: Array) -> Array:
    """Sums of x (A, N, B) over N: those along memory in NumPy's order, and otherwise of blocks of rows."""
    outer, rows, n = x.shape
    if n == 1:
        return x.reshape(outer, rows).sum(axis=1)[:, None]
    whole = rows // BLOCK * BLOCK
    return x[:, :whole].reshape(outer, rows // BLOCK, BLOCK, n).sum(axis=2).sum(axis=1) + x[:, whole:].sum(axis=1)


def _variances(x: Array) -> tuple[Array, Array]:
    wide = x.astype("float64")
    means = _sums(wide) / x.shape[1]
    wide -= means[:, None]
    wide *= wide
    return means, _sums(wide)


@host("variances", "variances", "X:anb D!:ab D!:ab ia in ib")
def _variances_host(call: CFunction, x: Array) -> tuple[Array, Array]:
    outer, _, n = x.shape
    means, squares = np.empty((outer, n)), np.empty((outer, n))
    call(x, means, squares, *x.shape)
    return means, squares


variances = Kernel("variances", _variances, host=_variances_host)
"""(means, sums of squared distances from them), both (A, B) in float64, over the middle dim of x (A, N, B) without gaps."""


def squares_over(x: Array, dims: tuple[int, ...]) -> tuple[Array, Array]:
    """The same over `dims`, which are counted from 0; both results keep them with length 1."""
    kept = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
    order = sorted((dim for dim, n in enumerate(x.shape) if n != 1), key=lambda dim: -abs(x.strides[dim]))     # as they lie
    places = [place for place, dim in enumerate(order) if dim in dims]
    if places and places != list(range(places[0], places[-1] + 1)):
        order = [dim for dim in order if dim not in dims] + [dim for dim in order if dim in dims]
        places = list(range(len(order) - len(places), len(order)))
    first, last = (places[0], places[-1] + 1) if places else (len(order), len(order))
    rest = [dim for dim in range(x.ndim) if dim not in order]
    before, after = order[:first], order[last:]
    sizes = [prod(x.shape[dim] for dim in some) for some in (before, order[first:last], after)]
    flat = array_module(x).ascontiguousarray(x.transpose(order + rest).reshape(sizes), x.dtype.newbyteorder("="))
    stays = before + after
    made = []
    for found in variances(flat):
        turned = found.reshape([x.shape[dim] for dim in stays]).transpose(sorted(range(len(stays)), key=lambda i: stays[i]))
        made.append(turned.reshape(kept))
    return made[0], made[1]
