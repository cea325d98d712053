"""Dynamic loss scaling (Micikevicius et al.: "Mixed precision training", 2018): in float16 small gradients would become zero.

    begin()           -> the scale of this step, on the device
    scale(grad)          the gradient that each backward starts with, times the scale
    finish(...)       -> the numbers of the step: norm, what the update multiplies gradients with, whether it happens
                         and, by the same launch, the scale of the next step

Gradients are then multiples of the scale throughout the exchange. The update divides by it, on their way in; where one is not
finite it changes nothing, and the scale falls. Nobody reads the scale: it stays on the device. The rule is that of
torch.amp.GradScaler. A step that is left out does not count for the optimizer, whose bias corrections go by its own steps: they
are counted on the device, too. For the run it counts: batches and schedules of the learning rate go on, as in a PyTorch program
that calls ``scheduler.step()`` after ``scaler.update()`` without looking.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.backend import Array, asnumpy, overwrite
from mpitrain.errors import ConfigError
from mpitrain.kernels.optimizer import GOOD, LEFT_OUT, SCALE
from mpitrain.optim.norm import numbers_of_a_step
from mpitrain.parallel.gradients.norm import GradientNorm


class LossScale:
    """The scale of a run's loss, the same on all ranks: they see the same sums, so they take the same decisions.

    It begins at `initial`, grows by `growth` after `interval` steps without a gradient that is not finite, and falls by `backoff`
    at one. Powers of two change no bits but those of the smallest numbers. `numbers` are `kernels.optimizer.conclude_norm`'s, on
    the device of the array module `xp`. ConfigError where a number makes no sense.
    """

    def __init__(self, xp: Any, *, initial: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000):
        if not (0.0 < initial < math.inf and growth > 1.0 and 0.0 < backoff < 1.0 and interval >= 1):
            raise ConfigError("a loss scale wants initial > 0, growth > 1, backoff in (0, 1) and interval >= 1, found "
                              f"{initial}, {growth}, {backoff} and {interval}")
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.numbers = numbers_of_a_step(xp)
        self.restore({"scale": initial, "good": 0})

    def scale(self, grad: Array) -> Array:
        """`grad`, by which a loss's backward starts, times the scale of this step; float32, or wider. The scale is read where it
        lies, so that a captured graph has that of its step."""
        scaled: Array = (grad * self.numbers[SCALE].astype("float32")).astype(grad.dtype, copy=False)
        return scaled

    def finish(self, norm: GradientNorm, gradients: Any, limit: float = 0.0) -> Array:
        """The numbers of the step, for the update, out of the summed gradients; clipped at `limit` (0: not) after the scale has
        been taken off. It communicates where ranks have parts of the model."""
        norm.conclude(gradients, self.numbers, limit, interval=self.interval, growth=self.growth, backoff=self.backoff)
        return self.numbers

    def restart(self) -> None:
        """Forgets how many steps have been left out, as the optimizer forgets its own; the scale stays."""
        self.numbers[LEFT_OUT] = 0

    def record(self) -> dict[str, Any]:
        """What a resumed run needs, on the host; waits for the device."""
        found = asnumpy(self.numbers)
        return {"scale": np.array(found[SCALE]), "good": np.array(int(found[GOOD])), "left_out": np.array(int(found[LEFT_OUT]))}

    def restore(self, found: dict[str, Any]) -> None:
        """Goes on from `record`; where it is empty, from what there is."""
        if found:
            host = asnumpy(self.numbers).copy()
            host[SCALE], host[GOOD], host[LEFT_OUT] = float(found["scale"]), int(found["good"]), int(found.get("left_out", 0))
            overwrite(self.numbers, host)
