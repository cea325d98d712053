"""Number formats by name, and what may be mixed.

With train.precision = "bfloat16" or "float16", a device computes in that format of 16 bits beside values, gradients and optimizer
state of float32. On the host "bfloat16" is a format of the operands of matrix products alone, and arrays are float32.
So is "tf32" on a device, and nothing at all on the host: it is float32 whose products have 10 bits of fraction.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, nearest

FLOATS: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64),
                                    "bfloat16": np.dtype(np.float32), "float16": np.dtype(np.float32),
                                    "tf32": np.dtype(np.float32)}
"""The dtype of values, gradients and optimizer state, by precision."""

HALF = ("bfloat16", "float16")
HALF_CHARS = "eE"                            # float16's character, and that of bfloat16 of ml_dtypes, whose kind is "V"


def float_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the values of a precision named in a config: "float32", "float64", "bfloat16", "float16" or
    "tf32"."""
    if name not in FLOATS:
        raise ConfigError(f'unknown precision "{name}"{nearest(name, FLOATS)}')
    return FLOATS[name]


def is_mixed(name: str, on_gpu: bool) -> bool:
    """Whether activations have 16 bits, beside values of float32."""
    return on_gpu and name in HALF


def product_format(name: str, on_gpu: bool) -> str:
    """The format that products of a precision round their operands to; "" for that of the arrays."""
    return name if name == ("tf32" if on_gpu else "bfloat16") else ""


def compute_dtype(name: str, device: Any) -> np.dtype[Any]:
    """The dtype of activations of a precision on a `Device`: of 16 bits where that is mixed, else that of the values."""
    wide = float_dtype(name)
    return half_dtype(name) if is_mixed(name, device.xp is not np) else wide


@cache
def half_dtype(name: str) -> np.dtype[Any]:
    """ "bfloat16" or "float16" as a dtype. ConfigError where bfloat16's package is not installed."""
    if name == "float16":
        return np.dtype(np.float16)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ConfigError('train.precision = "bfloat16" on a GPU needs the package ml_dtypes; install mpitrain[cuda12] or '
                          '[cuda13], or set train.precision = "float32"') from None
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found


def is_float(dtype: Any) -> bool:
    """Whether numbers of a dtype have fractions, and are real."""
    dtype = np.dtype(dtype)
    return bool(dtype.kind == "f" or dtype.char == "E")


def is_half(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits."""
    return bool(dtype.char in HALF_CHARS)


def statistics_dtype(dtype: Any) -> Any:
    """The dtype of sums, statistics and gradients of parameters, of arrays of a dtype: float32 of 16 bits, else the same."""
    return FLOATS["float32"] if is_half(dtype) else dtype
