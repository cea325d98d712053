"""Losses on a device that the host reads when somebody asks for them: until then it only launches work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, Device
from mpitrain.data import MicroBatch
from mpitrain.errors import NumericsError


class LateLosses:
    """The summed losses of a step's micro-batches, 0-d arrays on `device`, on their way to the host; `count` is the number of
    their terms over all ranks. `float` of it is their part of the mean loss. They come down with the next small copy that has
    room, that of the norm's numbers; where there is none, by their own, from `begin` on. `without_terms` makes the error of
    losses whose count is 0."""

    def __init__(self, device: Device, losses: Sequence[Array], micro_batches: Sequence[MicroBatch], n_micro: int,
                 count: float, without_terms: Callable[[float], Exception]):
        together = device.xp.stack(list(losses)) if len(losses) > 1 else losses[0].reshape(1)
        self._read, self._micro = device.downloads.with_next(together), [(m.index, m.step, m.first) for m in micro_batches]
        self._n_micro, self._count, self._without_terms = n_micro, count, without_terms
        self._parts: np.ndarray[Any, Any] | None = None

    def begin(self) -> None:
        """Begins their copy, if they are not on their way yet: before the next step writes other losses there."""
        self._read.begin()

    def parts(self) -> np.ndarray[Any, Any]:
        """Each micro-batch's part of the mean loss, (n_micro,) float64, 0 where it is another rank's. Waits for the device.
        NumericsError where one is not finite: the update of that step may have made parameters so as well."""
        if self._parts is None:
            found = np.zeros(self._n_micro)
            for (index, step, first), value in zip(self._micro, self._read()):
                if not math.isfinite(value):
                    raise NumericsError(f"the loss of micro-batch {index}, from row {first} of the batch on, is {float(value)}; "
                                        "nothing has been saved since; try a smaller optimizer.lr, or look at the data",
                                        step=step + 1)
                found[index] = value
            if not self._count and found.any():
                raise self._without_terms(math.fsum(found))
            self._parts = found / (self._count or 1.0)
        return self._parts

    def __float__(self) -> float:
        return math.fsum(self.parts())


def parts_of(losses: np.ndarray[Any, Any] | LateLosses) -> np.ndarray[Any, Any]:
    """The parts of the mean loss; waits for those of a device."""
    return losses.parts() if isinstance(losses, LateLosses) else losses
