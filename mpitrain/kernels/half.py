"""Kernels without a device version, on arrays of 16 bits: their expressions run in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mpitrain.backend.dtype import is_half
from mpitrain.backend.namespace import is_array


def in_single(reference: Callable[..., Any]) -> Callable[..., Any]:
    """`reference` on the same arguments in float32, where some are arrays of 16 bits: what it has written to them is rounded, and
    so are results as large as one of them. Others, such as statistics of rows, stay float32."""
    @wraps(reference)
    def run(*arguments: Any) -> Any:
        given = [x for x in arguments if is_array(x) and is_half(x.dtype)]
        if not given:
            return reference(*arguments)
        wide = {id(x): x.astype("float32") for x in given}
        result = reference(*[wide.get(id(x), x) for x in arguments])
        for x in given:
            if x.flags.writeable if hasattr(x.flags, "writeable") else True:
                x[...] = wide[id(x)]
        back, sizes = {id(wide[id(x)]): x for x in given}, {x.size for x in given}

        def rounded(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple([rounded(part) for part in value])
            if id(value) in back:
                return back[id(value)]
            return value.astype(given[0].dtype) if is_array(value) and value.dtype == "float32" and value.size in sizes else value
        return rounded(result)
    return run
