"""Number formats by name, and what may be mixed."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, nearest

# bfloat16 is a format of the operands of matrix products alone: values, gradients and optimizer state are float32.
FLOATS: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64),
                                    "bfloat16": np.dtype(np.float32)}


def float_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the arrays of a precision named in a config: "float32", "float64" or "bfloat16"."""
    if name not in FLOATS:
        raise ConfigError(f'unknown precision "{name}"{nearest(name, FLOATS)}')
    return FLOATS[name]


def is_float(dtype: Any) -> bool:
    return bool(np.dtype(dtype).kind == "f")
