"""Every differentiable operation, once. Inputs are tensors, arrays or numbers; results are tensors.

An op is here as soon as its file has its name in `__all__`. Importing this package attaches the operators (``x + y``, ``x[i]``,
``x.sum()``) to Tensor. The files in `LATER` are read when a name is asked for that none of the others has: most runs need none.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpitrain.ops import operators
from mpitrain.ops.activation import *
from mpitrain.ops.attention import *
from mpitrain.ops.choice import *
from mpitrain.ops.comparison import *
from mpitrain.ops.conv import *
from mpitrain.ops.dropout import *
from mpitrain.ops.elementwise import *
from mpitrain.ops.experts import *
from mpitrain.ops.index import *
from mpitrain.ops.layer_norm import *
from mpitrain.ops.linalg import *
from mpitrain.ops.loss import *
from mpitrain.ops.normalisation import *
from mpitrain.ops.pool import *
from mpitrain.ops.reduce import *
from mpitrain.ops.shape import *

# No file may have the name of an op: what is imported last would hide the other.
LATER: tuple[str, ...] = (
    "binary",
    "cells",
    "complex_numbers",
    "contraction",
    "conv_nd",
    "creation",
    "ctc",
    "decompositions",
    "diagonals",
    "gates",
    "joining",
    "logic",
    "losses",
    "margin_losses",
    "masks",
    "matrices",
    "moving",
    "norms",
    "patches",
    "pool_nd",
    "products",
    "rectifiers",
    "recurrent",
    "resample",
    "rotary",
    "scans",
    "scatter_reductions",
    "scattering",
    "sorting",
    "special",
    "spectral",
    "statistics",
    "unary",
)

operators.attach()


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        ours = operators.PYTORCH_NAMES.get(name, name)
        if ours != name:
            return globals().setdefault(name, globals()[ours] if ours in globals() else __getattr__(ours))
        for file in LATER:
            module = importlib.import_module(f"{__name__}.{file}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    later = [name for file in LATER for name in importlib.import_module(f"{__name__}.{file}").__all__]
    return sorted({*globals(), *later, *operators.PYTORCH_NAMES})
