"""Every differentiable operation, once. Inputs are tensors, arrays or numbers; results are tensors.

An op is here as soon as its file has its name in `__all__`. Importing this package attaches the operators (``x + y``, ``x[i]``,
``x.sum()``) to Tensor. The files in `files.py` are read when one of their names is asked for: most runs need none.
"""

from __future__ import annotations

from inspect import isfunction as _isfunction
from typing import Any

from mpitrain.ops import inputs, operators
from mpitrain.ops.activation import *
from mpitrain.ops.choice import *
from mpitrain.ops.comparison import *
from mpitrain.ops.dropout import *
from mpitrain.ops.elementwise import *
from mpitrain.ops.experts import *
from mpitrain.ops.files import FILES
from mpitrain.ops.index import *
from mpitrain.ops.layer_norm import *
from mpitrain.ops.linalg import *
from mpitrain.ops.loss import *
from mpitrain.ops.reduce import *
from mpitrain.ops.shape import *
from mpitrain.registry import Later

LATER = Later(__name__, FILES)

operators.attach()
globals().update({name: inputs.door(value) for name, value in globals().items()
                  if _isfunction(value) and value.__module__.startswith(f"{__name__}.")})


def __getattr__(name: str) -> Any:
    ours = operators.PYTORCH_NAMES.get(name, name)
    if ours in globals():
        return globals().setdefault(name, globals()[ours])
    if ours in LATER:
        found = LATER[ours]
        globals()[ours] = inputs.door(found) if _isfunction(found) else found
        return globals().setdefault(name, globals()[ours])
    from mpitrain.ops.pytorch import OPS, UnknownName  # few names are wrong
    raise UnknownName(f"module {__name__!r}", name, OPS, __dir__)


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER.names(), *operators.PYTORCH_NAMES})
