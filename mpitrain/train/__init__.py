"""The loop, and all that a run needs around it: building, evaluation, checkpoints, the run folder, logging."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"Job": "assembly", "assemble": "assembly", "open_data": "inputs", "Inputs": "inputs",
          "Trainer": "trainer", "RunFolder": "run_folder"}

__all__ = ["Inputs", "Job", "RunFolder", "Trainer", "assemble", "open_data"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
