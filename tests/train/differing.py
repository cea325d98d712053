"""A user's model that DIFFERS in the environment makes another function: "rank" on rank 1, "pass" at each pass."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpitrain import nn

KIND = os.environ.get("DIFFERS", "")
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.factor = 1.5 if KIND == "rank" and RANK == 1 else 1.0

    def forward(self, x: Any) -> Any:
        found = self.layers(x * self.factor)
        return found + float(np.random.default_rng().uniform()) if KIND == "pass" else found
