"""The training loop and its surroundings: building, evaluation, checkpoints, the run folder, logging."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"Job": "train.build.assembly", "assemble": "train.build.assembly",
          "open_data": "train.build.inputs", "Inputs": "train.build.inputs", "Trainer": "train.trainer",
          "RunFolder": "checkpoint.run_folder", "Observer": "train.observers"}

__all__ = ["Inputs", "Job", "Observer", "RunFolder", "Trainer", "assemble", "open_data"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"mpitrain.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
