"""Losses by name. Each gives the SUM over its terms and, separately, how many there are.

The trainer adds counts over all ranks and divides once, so uneven batches and ignored labels stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor, in_single
from mpitrain.backend import Array, asnumpy
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.nn.arguments import Checked
from mpitrain.ops.inputs import door
from mpitrain.registry import Registry, named

__all__ = ["LOSSES", "Loss"]


class Loss(Checked):
    """``loss(output, target)`` is the sum, ``loss.count(target)`` the number of terms in it.

    `kind` says what a target is: "classes" (integer labels, output (..., C)), "binary" (0 ... 1, like the output),
    "distribution" (probabilities, like the output), "values" (numbers, like the output), or "rows" (anything, for each row).
    `bounds` and `among` say which numbers a target has. `outputs_are` says what the model gives where targets are classes or
    binary: "logits", "probabilities", or "scores", which are neither.
    """

    kind = "values"
    outputs_are = "logits"
    bounds = (-math.inf, math.inf)           # the targets lie in it, which a run makes sure of before it starts, ...
    among: tuple[float, ...] = ()            # ... and are some of these numbers, if there are any
    takes_half = False                       # whether it takes outputs of 16 bits; others get them in float32
    counted_weight: Any = None                    # of classes: weights whose sum is the count; a run wants them 0 or more

    @door
    def __call__(self, output: Tensor, target: Array) -> Tensor:
        if tuple(n for n in target.shape if n != 1) != tuple(n for n in output.shape if n != 1):       # (B,) may be (B, 1)
            raise ShapeError(f"the model's output has shape {output.shape}, the target {tuple(target.shape)}; they must be equal")
        output = in_single(output)
        return self.total(output, target.reshape(output.shape).astype(output.dtype, copy=False))

    def total(self, output: Tensor, target: Array) -> Tensor:
        """The sum, for a target of the output's shape and dtype."""
        raise GraphError(f"{type(self).__name__} defines no total")

    def count(self, target: Array) -> Any:
        return int(target.size)


LOSSES: Registry[Callable[..., Loss]] = Registry("loss")
for _file, _names in {
        "losses": ("nll", "smooth_l1", "poisson_nll", "hinge_embedding", "multi_margin", "multilabel_margin",
                   "multilabel_soft_margin", "soft_margin", "dice", "focal"),
        "losses_of_samples": ("relative_l2", "elbo"),
        "losses_of_several": ("gaussian_nll", "ctc", "triplet", "cosine_embedding", "margin_ranking")}.items():
    for _name in _names:
        LOSSES.register_later(_name, f"mpitrain.nn.{_file}:{_name}")


def terms(loss: Any, target: Array) -> float:
    """The number of terms of a loss. ConfigError unless it is a number of 0 or more."""
    found = loss.count(target)
    if isinstance(found, Real) and 0.0 <= (count := float(found)) < math.inf:
        return count
    raise ConfigError(f'the count of train.loss, "{named(loss)}", is the number of terms in its sum over {len(target)} samples, '
                      f"0 or more, found {named(found)}")


def count_of_labels(target: Any, weight: Any, ignore_index: int | None) -> int | float:
    """The number of labels that are not ignored; with `weight`, a number for each class, the sum of theirs."""
    if weight is None:
        return ops.cross_entropy_count(target, ignore_index=ignore_index)
    labels, given = (asnumpy(x.array if isinstance(x, Tensor) else x) for x in (target, weight))
    counted = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    wrong = labels[counted & ((labels < 0) | (labels >= given.size))]
    if wrong.size:
        raise ShapeError(f"a label is {wrong[0]}, and there are weights for {given.size} classes, 0 to {given.size - 1}")
    return float(given.astype(np.float64)[np.where(counted, labels, 0)][counted].sum())


@LOSSES.register("cross_entropy")
class CrossEntropy(Loss):
    """Cross-entropy of logits (..., C) and integer labels (...); one term a label, less those equal to `ignore_index`.

    With `weight`, a number for each class, the count is the sum of the weights of those labels, so that the loss of a run is the
    weighted mean over all rows of all ranks.
    """

    kind = "classes"
    takes_half = True

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int | None = None, weight: Sequence[float] | None = None):
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing lies in [0, 1], not {label_smoothing}")
        if not isinstance(ignore_index, int | None):
            raise TypeError("ignore_index is a label")
        self.label_smoothing, self.ignore_index, self.counted_weight = label_smoothing, ignore_index, weight

    @door
    def __call__(self, output: Tensor, target: Array) -> Tensor:
        if self.counted_weight is not None:
            output = in_single(output)
            return ops.cross_entropy_loss(output, target, self.counted_weight, self.ignore_index, "sum", self.label_smoothing,
                                          dim=-1)
        return ops.cross_entropy(output, target, label_smoothing=self.label_smoothing, ignore_index=self.ignore_index)

    def count(self, target: Array) -> Any:
        return count_of_labels(target, self.counted_weight, self.ignore_index)


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
    """Cross-entropy of logits and targets in 0 ... 1; one term an element. `pos_weight`, a number or one for each element of the
    last dim, is the weight of what is there."""

    kind = "binary"
    bounds = (0.0, 1.0)

    def __init__(self, pos_weight: float | Sequence[float] | None = None):
        self.pos_weight = pos_weight

    def total(self, output: Tensor, target: Array) -> Tensor:
        if self.pos_weight is not None:
            return ops.binary_cross_entropy_with_logits_loss(output, target, None, "sum", self.pos_weight)
        return ops.binary_cross_entropy_with_logits(output, target)


@LOSSES.register("kl")
class KLDivergence(Loss):
    """The divergence of target probabilities (..., C) from softmax(output); one term a distribution.

    The output may be logits or log-probabilities: log-softmax leaves the latter as they are.
    """

    kind = "distribution"
    bounds = (0.0, math.inf)

    def total(self, output: Tensor, target: Array) -> Tensor:
        return ops.kl_divergence(ops.log_softmax(output), target)

    def count(self, target: Array) -> int:
        return math.prod(target.shape[:-1])
