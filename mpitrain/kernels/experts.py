"""Routing of rows to experts, their dispatch and their return. Letters: `T` rows, `E` experts, `K` choices of each row, `C`
places of each expert.

A row has a *slot*, expert * C + place, for each of its choices, or -1 where its expert had no place left; a slot has a *source*,
choice * T + row, or -1 where it stays empty. Knowing both, every sum here is over the choices of a row, in their order: no two
rows are ever added where they arrive, so nothing depends on timing.
"""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array, array_module


def largest(scores: Array, k: int) -> Array:
    """(T, K) int64: the places of the k largest of each row's scores (T, E), largest first; of equal ones the first."""
    xp = array_module(scores)
    left, rows = scores.copy(), xp.arange(len(scores))
    chosen = xp.empty((len(scores), k), xp.int64)
    for i in range(k):
        chosen[:, i] = left.argmax(axis=1)
        left[rows, chosen[:, i]] = -xp.inf
    return chosen


def places(chosen: Array, experts: int, capacity: int) -> tuple[Array, Array, Array]:
    """(slots (K, T), sources (E C,), how often each expert was chosen (E,)) for choices (T, K).

    Places are given to first choices before second ones, and among these in the order of rows (Lepikhin et al. 2020: "GShard",
    algorithm 1).
    """
    xp = array_module(chosen)
    flat = xp.ascontiguousarray(chosen.T).reshape(-1)
    order = xp.argsort(flat, kind="stable")
    of_expert = flat[order]
    starts = xp.searchsorted(of_expert, xp.arange(experts + 1))
    place = xp.empty_like(flat)
    place[order] = xp.arange(flat.size) - starts[of_expert]
    kept = place < capacity
    places = flat * capacity + place
    sources = xp.full(experts * capacity + 1, -1, xp.int64)
    sources[xp.where(kept, places, experts * capacity)] = xp.arange(flat.size)        # those without a place go behind the others
    return xp.where(kept, places, -1).reshape(chosen.shape[::-1]), sources[:-1], starts[1:] - starts[:-1]


def rows_at(x: Array, index: Array) -> Array:
    """Row index[i] of x (R, D) for each i, zeros where that is -1."""
    xp = array_module(x)
    found: Array = xp.take(x, xp.maximum(index, 0), axis=0)
    if xp is np:
        found[index < 0] = 0
    else:                                 # a device would have to be waited for: how many rows that are
        xp.copyto(found, 0, where=(index < 0)[:, None])
    return found


def add_rows(x: Array, slots: Array, factors: Array | None = None) -> Array:
    """(T, D): for each row t the sum over k of row slots[k, t] of x, times factors[k, t] where given; -1 adds nothing."""
    total = None
    for k, index in enumerate(slots):
        rows = rows_at(x, index)
        if factors is not None:
            rows *= factors[k][:, None]
        total = rows if total is None else array_module(x).add(total, rows, out=total)
    assert total is not None, "a row has one choice at least"
    return total


def dot_rows(x: Array, slots: Array, rows: Array) -> Array:
    """(K, T): row t of `rows` (T, D) times row slots[k, t] of x, summed over D; zero where that is -1."""
    xp = array_module(x)
    return xp.stack([xp.einsum("td,td->t", rows_at(x, index), rows) for index in slots])
