"""Modules, layers, initialisers, losses, and the flat storage parameters live in: what each file lists in its `__all__`.

The files in `LATER` are read when a name is asked for that none of the others has: most runs need none.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpitrain.nn import init as init
from mpitrain.nn.activation import *
from mpitrain.nn.attention import *
from mpitrain.nn.basic import *
from mpitrain.nn.conv import *
from mpitrain.nn.loss import *
from mpitrain.nn.module import *
from mpitrain.nn.moe import *
from mpitrain.nn.norm import *
from mpitrain.nn.parameter import *
from mpitrain.nn.pool import *
from mpitrain.nn.sequential import *
from mpitrain.nn.statistics import *
from mpitrain.nn.storage import *

LATER: tuple[str, ...] = (
    "bags",
    "blocks",
    "cells",
    "containers",
    "instance_norm",
    "losses",
    "losses_of_several",
    "noise",
    "packed",
    "padding",
    "pairs",
    "rectifiers",
    "recurrent",
    "reparametrised",
    "shapes",
    "transformer",
)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for file in LATER:
            module = importlib.import_module(f"{__name__}.{file}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for file in LATER for name in importlib.import_module(f"{__name__}.{file}").__all__)})
