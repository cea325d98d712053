"""What a round tells of its workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.data.rounds import Rounds
from mpitrain.parallel.pipeline.tallies import Tallies
from mpitrain.parallel.workers.deltas import Deltas
from mpitrain.placement.stages import Stage


class RoundTallies(Tallies):
    """The workers that were drawn and that answered, how far apart they ended (`drift`), and the bytes that they send up.

    drift^2 = sum of w_k |d_k - d|^2 = sum of w_k |d_k|^2 - |d|^2, for the deltas d_k of weights w_k and their mean d, as far as
    the norm of d is known.
    """

    def __init__(self, stage: Stage, rounds: Rounds, deltas: Deltas, bytes_of_each: int):
        super().__init__(stage)
        self.rounds, self.deltas, self.bytes_of_each = rounds, deltas, bytes_of_each
        self.round = 0                                        # the round in progress, counted from 0

    def take(self) -> np.ndarray[Any, Any]:
        """The squares of this rank's seats, zeros for others', behind what the model's mixtures have counted."""
        return np.concatenate([super().take(), self.deltas.squares])

    def told(self, tally: np.ndarray[Any, Any], norm: float | None) -> dict[str, float]:
        squares = math.fsum(tally[-self.rounds.seats:])
        drawn, arrived = len(self.rounds.draw.drawn(self.round)), len(self.rounds.draw.arrived(self.round))
        found = super().told(tally[:-self.rounds.seats], norm)
        found |= {"round": self.round + 1, "workers": arrived, "dropped": drawn - arrived,
                  "wire_bytes": arrived * self.bytes_of_each}
        if self.deltas.compares and norm is not None and math.isfinite(norm):
            found["drift"] = math.sqrt(max(squares - norm * norm, 0.0))
        return found
