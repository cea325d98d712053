"""The changes of a round's workers, on their way into the gradient arenas and out of them."""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array
from mpitrain.data.rounds import Turn
from mpitrain.optim.norm import sum_of_squares


class Deltas:
    """A delta is what a worker's training took off the parameters: theta_start - theta_worker, a flat array.

    `add` is where one worker's delta enters the sum of its seat, and `arrived` where the sum over all workers has come to every
    rank: whoever bounds, hides or noises what a worker tells does so in these two places.
    """

    travels = True                               # whether the sum goes by the arenas of gradients
    compares = True                              # whether `squares` are told

    def __init__(self, seats: int):
        self.squares = np.zeros(seats)           # of each seat of this rank: the weighted squared norms of its deltas

    def begin(self, round: int) -> None:
        """A round, counted from 0, begins."""
        self.squares[:] = 0.0

    def add(self, turn: Turn, delta: Array, total: Array, *, first: bool) -> None:
        """Adds `delta`, times the worker's weight, to its seat's `total`, which is undefined before the `first`. `delta` may be
        written to."""
        self.squares[turn.index] += turn.weight * sum_of_squares(delta)
        delta *= delta.dtype.type(turn.weight)
        if first:
            total[...] = delta
        else:
            total += delta

    def arrived(self, total: Array, round: int) -> Array:
        """The outer gradient, out of the sum over all workers of a round; the same bits on all ranks."""
        return total
