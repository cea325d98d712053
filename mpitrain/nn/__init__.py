"""Modules, layers, initialisers, losses, and the flat storage parameters live in: what each file lists in its `__all__`.

The files in `files.py` are read when one of their names is asked for: most runs need none.
"""

from __future__ import annotations

from inspect import isfunction as _isfunction
from typing import Any

from mpitrain.nn import init as init
from mpitrain.nn.activation import *
from mpitrain.nn.basic import *
from mpitrain.nn.files import FILES
from mpitrain.nn.loss import *
from mpitrain.nn.module import *
from mpitrain.nn.moe import *
from mpitrain.nn.parameter import *
from mpitrain.nn.sequential import *
from mpitrain.nn.statistics import *
from mpitrain.nn.storage import *
from mpitrain.ops import inputs as _inputs
from mpitrain.registry import Later

LATER = Later(__name__, FILES)


def __getattr__(name: str) -> Any:
    if name in LATER:
        found = LATER[name]
        return globals().setdefault(name, _inputs.door(found) if _isfunction(found) else found)
    from mpitrain.ops.pytorch import NN, UnknownName  # few names are wrong
    raise UnknownName(f"module {__name__!r}", name, NN, __dir__)


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER.names()})
