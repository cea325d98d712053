"""Loops behind the door: checked at each call, and compiled for the dtype of their arrays at the first call with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpitrain.kernels.door import Door, slots_of
from mpitrain.kernels.kernel import Function, compiled
from mpitrain.kernels.library import failed

NAMES = {"f": "float32", "d": "float64", "": ""}
KINDS = {"F": "float32", "D": "float64", "H": "uint16", "I": "int32", "U": "uint32", "L": "int64", "B": "uint8", "M": "uint8"}


def loop(signature: str, answers: bool = False, name: str = "") -> Callable[[Function], Function]:
    """Numba's version of a function of flat arrays and numbers, with a `signature` as a function of C has it
    (`mpitrain.kernels.door`).

    What comes back takes arrays of any shape without gaps, and raises what does not fit the signature. The function gets flat
    ones: empty ones for None, booleans as uint8, uint64 as int64. One that `answers` returns 0, or 2 where an index lies outside
    of what it counts, which raises IndexError.
    """
    slots = slots_of(signature)
    places = [(place, slot.kind, _empty(slot.kind)) for place, slot in enumerate(slots) if slot.kind not in "id"]

    def decorate(function: Function) -> Function:
        door = Door(name or function.__name__.strip("_"), slots)

        @cache
        def version(chosen: str) -> Function:
            types = {"i": "int64", "d": "float64", **KINDS, "X": NAMES[chosen]}
            words = [types[slot.kind] if slot.kind in "id" else _array(types[slot.kind], slot.written) for slot in slots]
            return compiled(f"{'int64' if answers else 'void'}({', '.join(words)})")(function)

        def call(*arguments: Any) -> None:
            chosen, given = door(arguments)
            for place, kind, empty in places:
                x = given[place]
                if x is None:
                    x = empty[chosen]
                elif x.ndim != 1:
                    x = x.reshape(-1)
                if kind in VIEWED and x.dtype is not VIEWED[kind]:
                    x = x.view(VIEWED[kind])
                given[place] = x
            code = version(chosen)(*given)
            if code:
                failed(door.name, code)
        return call
    return decorate


VIEWED = {"L": np.dtype(np.int64), "B": np.dtype(np.uint8), "M": np.dtype(np.uint8)}


def _empty(kind: str) -> dict[str, Any]:
    """What stands for None, for each version."""
    return {chosen: np.empty(0, KINDS.get(kind) or name or np.float32) for chosen, name in NAMES.items()}


def _array(dtype: str, written: bool) -> str:
    """The type of a flat array without gaps; one that is only read may be read-only."""
    return f"{dtype}[::1]" if written else f"Array({dtype}, 1, 'C', True)"
