"""What ranks count in a step, and add up in a message that leaves before the first forward and is waited for at its first use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.nn.loss import Loss
from mpitrain.registry import named
from mpitrain.schedules.microtree import share


class StepCount:
    """The terms of a step's loss, the rows of this rank's `site` (its number, of how many), and two flags.

        counts = terms of each micro-batch | rows of each site | flags

    `total` are the terms of all ranks, and `of_site` those of the site's own micro-batches: sums that may be of weights, each
    rounded once. They are there once nothing `travels`.
    """

    def __init__(self, channel: Channel, n_micro: int, site: tuple[int, int]):
        self.n_micro, self._is_alone = n_micro, channel.size == 1
        self._own, self._rows = share(*site, n_micro), n_micro + site[0]
        self._counts = np.zeros(n_micro + site[1] + 2)
        self._add = channel.prepare(self._counts, "loss count")
        self._message: Any = None
        self.travels = False                                  # whether there is a sum to wait for
        self.total = self.of_site = self.rows = 0.0
        self.flags = (0.0, 0.0)

    def begin(self, terms: Sequence[tuple[int, float]], rows: int, flags: tuple[float, float]) -> None:
        """Sends what this rank counts: terms by the index of the micro-batch, and so on."""
        self._counts[:] = 0.0
        self._counts[self._rows], self._counts[-2:] = rows, flags
        for index, number in terms:
            self._counts[index] = number
        if self._is_alone:
            self._take()
        else:
            self._message, self.travels = self._add.start(), True

    def wait(self) -> None:
        self._message.wait()
        self._message, self.travels = None, False
        self._take()

    def _take(self) -> None:
        self.total = math.fsum(self._counts[:self.n_micro])
        self.of_site = self.total if self._own == (0, self.n_micro) else math.fsum(self._counts[slice(*self._own)])
        self.rows = float(self._counts[self._rows])
        self.flags = float(self._counts[-2]), float(self._counts[-1])


def without_terms(loss: Loss, value: float) -> ConfigError:
    """The error of a loss that counts none of the samples of a step."""
    return ConfigError(f'the count of train.loss, "{named(loss)}", is 0 for all samples of the step, whose loss is '
                       f"{value:.6g}; it is the number of terms in the sum")
