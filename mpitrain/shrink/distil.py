"""Distillation (Hinton, Vinyals and Dean 2015): a model learns a teacher's outputs along with the labels.

Letters: `B` batch, `C` classes, `T` temperature, `a` weight.
"""

from __future__ import annotations

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array
from mpitrain.errors import ConfigError


class Teacher:
    """The loss (1 - a) * hard + a * T^2 * KL(teacher || student), both at temperature T, as a sum over rows.

    `model` maps inputs to logits (..., C). Rows whose label is `ignore_index` count in neither part.
    """

    def __init__(self, model: nn.Module, temperature: float, weight: float, ignore_index: int | None = None):
        self.model, self.temperature, self.weight, self.ignore_index = model.eval(), temperature, weight, ignore_index

    def logits(self, x: Array, shape: tuple[int, ...]) -> Tensor:
        """The teacher's outputs for `x`. ConfigError where they have not the `shape` of the student's."""
        with no_grad():
            found: Tensor = self.model(Tensor(x))
        if tuple(found.shape) != shape:
            raise ConfigError(f"distil.teacher gives outputs of shape {tuple(found.shape)}, and the model {shape}: other classes "
                              "or another length; use a teacher of the same data")
        return found

    def __call__(self, x: Array, output: Tensor, target: Array, hard: Tensor) -> Tensor:
        """The loss of a micro-batch with inputs `x`, whose loss against its labels is `hard`."""
        T = self.temperature
        known = ops.log_softmax(self.logits(x, tuple(output.shape)) * (1 / T)).array
        p = output.xp.exp(known)
        if self.ignore_index is not None:
            p = p * (target != self.ignore_index)[..., None]
        soft = (Tensor(p) * (Tensor(known) - ops.log_softmax(output * (1 / T)))).sum()
        return hard * (1 - self.weight) + soft * (self.weight * T * T)
