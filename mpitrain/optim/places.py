"""Flat arrays that are views of parts of others: the memory they lie in, and where."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array


def memory_of(flat: Any) -> Array:
    """The array that a flat array lies in: itself, unless it is a view of parts of another (`groups.Strips`, `Shards.strips`)."""
    while hasattr(flat, "place"):
        flat = flat.flat
    return flat


def place_in(flat: Any, start: int) -> int:
    """Where element `start` of a flat array is in `memory_of` it."""
    while hasattr(flat, "place"):
        flat, start = flat.flat, flat.place(start)
    return start
