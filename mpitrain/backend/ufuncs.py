"""Methods of ufuncs that CuPy lacks: running maxima and the like, and products at places."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module, asnumpy


def accumulated(name: str, x: Array, axis: int) -> Array:
    """``np.<name>.accumulate(x, axis=axis)`` of an associative ufunc, where the device has no such method by log2(n) rounds in
    which each number meets the one 1, 2, 4, ... before it (Hillis and Steele: "Data parallel algorithms", 1986)."""
    xp = array_module(x)
    if xp is np:
        return getattr(np, name).accumulate(x, axis=axis)
    function, x, step = getattr(xp, name), xp.moveaxis(x, axis, 0), 1
    while step < len(x):
        x = xp.concatenate([x[:step], function(x[:-step], x[step:])])
        step *= 2
    return xp.moveaxis(x, 0, axis)


def at(name: str, out: Array, places: Any, values: Array) -> None:
    """``np.<name>.at(out, places, values)``; "multiply", which CuPy has not, is done on the host."""
    xp = array_module(out)
    if xp is np or name != "multiply":
        getattr(xp, name).at(out, places, values)
        return
    made = asnumpy(out)
    np.multiply.at(made, tuple(map(asnumpy, places)) if isinstance(places, tuple) else asnumpy(places), asnumpy(values))
    out[...] = xp.asarray(made)
