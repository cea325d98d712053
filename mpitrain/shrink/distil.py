"""Distillation (Hinton, Vinyals and Dean 2015): a model learns a teacher's outputs along with the labels.

Letters: `B` batch, `C` classes, `T` temperature, `a` weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError


class Teacher:
    """The loss (1 - a) * hard + a * T^2 * KL(teacher || student), both at temperature T, as a sum over rows.

    `logits` gives the teacher's (B, ..., C) for what it is called with. Rows whose label is `ignore_index` count in neither part.
    """

    def __init__(self, logits: Callable[[Any], Tensor], temperature: float, weight: float, ignore_index: int | None = None):
        self.logits, self.temperature, self.weight, self.ignore_index = logits, temperature, weight, ignore_index

    def __call__(self, given: Any, output: Tensor, target: Array, hard: Tensor) -> Tensor:
        """The loss of a micro-batch `given`, whose loss against its labels is `hard`."""
        T, logits = self.temperature, self.logits(given)
        if tuple(logits.shape) != tuple(output.shape):
            raise ConfigError(f"the teacher of [distil] gives outputs of shape {tuple(logits.shape)}, and the model "
                              f"{tuple(output.shape)}: other classes or another length; use a teacher of the same data")
        known = ops.log_softmax(logits * (1 / T)).array
        p = output.xp.exp(known)
        if self.ignore_index is not None:
            p = p * (target != self.ignore_index)[..., None]
        soft = (Tensor(p) * (Tensor(known) - ops.log_softmax(output * (1 / T)))).sum()
        return hard * (1 - self.weight) + soft * (self.weight * T * T)
