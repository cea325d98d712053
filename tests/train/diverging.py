"""A user's file with faults to be armed by the environment: a bit that flips on one rank, and a schedule that differs on one.

FLIP is [rank, step, parameter, element, bit], STOP [rank, step]: the rank asks for a stop as SIGUSR1 to `mpirun` does.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain import models, nn
from mpitrain.train import Observer
from mpitrain.train.observers import Watched

MODELS: list[nn.Module] = []


def network(kind: str = "mlp", **arguments: Any) -> nn.Module:
    """One of our models, kept, so that the observer can reach its parameters."""
    make: Any = models.MODELS[kind]
    MODELS.append(make(**arguments))
    return MODELS[-1]


class Faults(Observer):
    def begin(self, run: Watched) -> None:
        self.rank = run.rank
        self.flip, self.stop = (json.loads(os.environ.get(name, "[-1, 0]")) for name in ("FLIP", "STOP"))

    def after_step(self, step: int, fields: Any, seconds: float) -> None:
        if [self.rank, step] == self.flip[:2]:
            held = [p for model in MODELS for p in model.parameters() if p.allocated and p.size]
            _, _, parameter, element, bit = self.flip
            words = held[parameter % len(held)].array.reshape(-1).view(np.uint32)
            words[element % words.size] ^= np.uint32(1 << bit)
            print("flipped", held[parameter % len(held)].name, flush=True)
        if [self.rank, step] == self.stop:
            os.kill(os.getpid(), signal.SIGUSR1)


def rates(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """A schedule that RANK_RATE in the environment of a rank multiplies from step 7 on."""
    factor = float(os.environ.get("RANK_RATE", "1"))
    return lambda step: lr * (factor if step >= 7 else 1)
