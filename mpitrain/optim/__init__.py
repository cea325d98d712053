"""Optimizers and learning-rate schedules. Those that few runs use are loaded when they are first asked for."""

from typing import Any

from mpitrain.optim.layout import Segment
from mpitrain.optim.norm import clip_factor, squared_norm
from mpitrain.optim.optimizer import OPTIMIZERS, Optimizer
from mpitrain.optim.rules import LAMB, LARS, SGD, Adam, AdamW, RMSprop
from mpitrain.optim.schedule import SCHEDULES, schedule

_LATER = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "Lion", "Muon", "NAdam", "RAdam",
          "Rprop")

__all__ = ["ASGD", "LAMB", "LBFGS", "LARS", "OPTIMIZERS", "SCHEDULES", "SGD", "Adadelta", "Adafactor", "Adagrad",  # noqa: F822
           "Adam", "AdamW", "Adamax", "Lion", "Muon", "NAdam", "Optimizer", "RAdam", "RMSprop", "Rprop", "Segment", "clip_factor",
           "schedule", "squared_norm"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return OPTIMIZERS[name.lower()]
    from mpitrain.ops.pytorch import OPTIM, UnknownName  # few names are wrong
    raise UnknownName(f"module {__name__!r}", name, OPTIM, lambda: __all__)
