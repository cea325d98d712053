"""Losses by name. Each gives the SUM over its terms and, separately, how many there are.

The trainer adds counts over all ranks and divides once, so uneven batches and ignored labels stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.registry import Registry

__all__ = ["LOSSES", "Loss"]


class Loss:
    """``loss(output, target)`` is the sum, ``loss.count(target)`` the number of terms in it.

    `kind` says what a target is: "classes" (integer labels, output (..., C)), "binary" (0 ... 1, like the output),
    "distribution" (probabilities, like the output), or "values" (numbers, like the output).
    """

    kind = "values"

    def __call__(self, output: Tensor, target: Array) -> Tensor:
        if tuple(n for n in target.shape if n != 1) != tuple(n for n in output.shape if n != 1):       # (B,) may be (B, 1)
            raise ShapeError(f"the model's output has shape {output.shape}, the target {tuple(target.shape)}; they must be equal")
        return self.total(output, target.reshape(output.shape).astype(output.dtype, copy=False))

    def total(self, output: Tensor, target: Array) -> Tensor:
        """The sum, for a target of the output's shape and dtype."""
        raise GraphError(f"{type(self).__name__} defines no total")

    def count(self, target: Array) -> int:
        return int(target.size)


LOSSES: Registry[Callable[..., Loss]] = Registry("loss")


@LOSSES.register("cross_entropy")
class CrossEntropy(Loss):
    """Cross-entropy of logits (..., C) and integer labels (...); one term a label, less those equal to `ignore_index`."""

    kind = "classes"

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int | None = None):
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing lies in [0, 1], not {label_smoothing}")
        if not isinstance(ignore_index, int | None):
            raise TypeError("ignore_index is a label")
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index

    def __call__(self, output: Tensor, target: Array) -> Tensor:
        return ops.cross_entropy(output, target, label_smoothing=self.label_smoothing, ignore_index=self.ignore_index)

    def count(self, target: Array) -> int:
        return ops.cross_entropy_count(target, ignore_index=self.ignore_index)


@LOSSES.register("mse")
class MSE(Loss):
    """Squared differences; one term an element."""

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.mse(output, target)


@LOSSES.register("l1")
class L1(Loss):
    """Absolute differences; one term an element."""

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.l1(output, target)


@LOSSES.register("huber")
class Huber(Loss):
    """Half the square of differences up to `delta`, linear beyond (Huber 1964); one term an element."""

    def __init__(self, delta: float = 1.0):
        if not delta > 0.0:
            raise ConfigError(f"the delta of the huber loss is more than 0, not {delta}")
        self.delta = delta

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.huber(output, target, self.delta)


@LOSSES.register("binary_cross_entropy")
class BinaryCrossEntropy(Loss):
    """Cross-entropy of logits and targets in 0 ... 1; one term an element."""

    kind = "binary"

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.binary_cross_entropy_with_logits(output, target)


@LOSSES.register("kl")
class KLDivergence(Loss):
    """The divergence of target probabilities (..., C) from softmax(output); one term a distribution.

    The output may be logits or log-probabilities: log-softmax leaves the latter as they are.
    """

    kind = "distribution"

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.kl_divergence(ops.log_softmax(output), target)

    def count(self, target: Array) -> int:
        return math.prod(target.shape[:-1])
