"""The class that outputs name."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module

NO_CLASS = -1                                # of outputs that are NaN: no label is equal to it


def class_of_rows(outputs: Array) -> Array:
    """The place of the largest of each row of (..., C), int64 (...): the first of equal ones, NO_CLASS where one is NaN."""
    xp = array_module(outputs)
    place = xp.argmax(outputs, axis=-1)                       # That of a NaN, where there is one.
    found: Array = xp.where(xp.isnan(xp.take_along_axis(outputs, place[..., None], axis=-1)[..., 0]), NO_CLASS, place)
    return found
