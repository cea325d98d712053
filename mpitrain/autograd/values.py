"""What a tensor can hold: the arrays of numbers, lists of them, and the dtypes that there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd.mode import mode
from mpitrain.backend import Array
from mpitrain.errors import ShapeError

DTYPES = "?bBhHiIlLqQfdFD"                        # by NumPy's characters: no float16, nothing wider than float64, no words


def of_values(values: Any) -> Array:
    """The array of a number or of lists, in float32; of a NumPy number in its own dtype. ShapeError where they are none."""
    try:
        if isinstance(values, list | tuple) and mode.recording and any(getattr(part, "requires_grad", False) for part in values):
            raise TypeError("a list has tensors, whose gradients it would lose; write ops.stack(values)")
        array = np.asarray(values)
        if not isinstance(values, np.generic):
            if array.dtype.kind not in "biufO" or (array.dtype.kind == "O" and any(part is None for part in array.flat)):
                raise TypeError(f"{values!r:.60} has what is no real number")
            array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:     # RuntimeError: torch, of one with a gradient
        raise ShapeError(f"Tensor: {' '.join(str(error).split())}; expected real numbers, lists of equal lengths, or an "
                         "array (ops.tensor makes complex numbers of lists)") from None
    if array.dtype.char not in DTYPES:
        raise without_dtype(array.dtype)
    return array


def without_dtype(dtype: np.dtype[Any]) -> ShapeError:
    what = 'convert them first: array.astype("float32")' if dtype.kind in "fc" else "expected numbers"
    return ShapeError(f"Tensor: the values are {dtype}, which tensors do not have; {what}")
