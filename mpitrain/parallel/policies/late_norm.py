"""The norm of a gradient on a device, which clips there, and whose numbers the host reads a step later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.backend import Array, Device
from mpitrain.errors import NumericsError
from mpitrain.kernels.optimizer import FOUND, LOSSES
from mpitrain.optim.norm import numbers_of_a_step
from mpitrain.parallel.gradients.norm import GradientNorm


class LateNorm:
    """For ranks that each have the whole gradient, in steps whose norm nobody asks for."""

    def __init__(self, device: Device):
        self._device, self._numbers = device, numbers_of_a_step(device.xp)
        self._found: tuple[int, Callable[[], Any]] | None = None     # The step, and what reads the numbers that its norm left.

    @classmethod
    def of(cls, norm: GradientNorm, device: Device) -> LateNorm | None:
        """None where ranks have parts of the gradient, or the host has it."""
        return cls(device) if device.name == "gpu" and norm.channel is None else None

    def conclude(self, norm: GradientNorm, gradients: Any, clip_norm: float, step: int) -> Array:
        """The numbers of the step, on the device: for the optimizer."""
        norm.conclude(gradients, self._numbers, clip_norm)
        self._found = step, self._device.read_later(self._numbers, LOSSES)
        return self._numbers

    def wait(self) -> None:
        """Waits for the norm of a step that nobody has looked at. NumericsError where it was not finite."""
        if self._found is None:
            return
        (step, read), self._found = self._found, None
        if read()[FOUND]:
            raise NumericsError("the gradient is not finite; no parameter was changed in that step; try a smaller optimizer.lr",
                                step=step)
