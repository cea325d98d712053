"""PyTorch's losses as classes, and in runs: `train.loss` names them with `reduction` = "sum", as a run needs it.

The functions are those of `ops.losses` and `ops.ctc`. A run divides the sum over all rows of all ranks by the sum of their
counts, once, so `count` is what the "mean" of PyTorch divides by: of weighted labels the sum of their weights. Losses of several
inputs (pairs, triplets, mean and variance) take them one by one, or in a run stacked along dim 1 of the model's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor, in_single
from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.nn.loss import Loss, count_of_labels
from mpitrain.ops.inputs import door

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "DiceLoss", "FocalLoss", "HingeEmbeddingLoss", "HuberLoss",
           "KLDivLoss", "L1Loss", "MSELoss", "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "NLLLoss",
           "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss"]


class Reduced(Loss):
    """A loss whose terms are `function(output, target, **options)`; one for each element of the target."""

    function: Callable[..., Tensor]

    def __init__(self, reduction: str = "mean"):
        self.keep(reduction)

    def keep(self, reduction: str, **options: Any) -> None:
        self.reduction, self.options = reduction, options

    @door
    def __call__(self, output: Any, target: Any) -> Tensor:
        output = in_single(output)
        return type(self).function(output, as_output(output, target) if self.kind != "classes" else target,
                                   reduction=self.reduction, **self.options)


def as_output(output: Any, target: Any) -> Any:
    """A target array (B,) for an output (B, 1) in its shape, and in the output's dtype, as runs have them."""
    if isinstance(target, Tensor):
        return target
    if target.shape != output.shape and [n for n in target.shape if n != 1] == [n for n in output.shape if n != 1]:
        target = target.reshape(output.shape)
    return target.astype(output.dtype, copy=False)


class MSELoss(Reduced):
    """Squared differences."""

    function = staticmethod(ops.mse_loss)


class L1Loss(Reduced):
    """Absolute differences."""

    function = staticmethod(ops.l1_loss)


class SmoothL1Loss(Reduced):
    """See `ops.smooth_l1_loss`."""

    function = staticmethod(ops.smooth_l1_loss)

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        self.keep(reduction, beta=beta)


class HuberLoss(Reduced):
    """See `ops.huber_loss`."""

    function = staticmethod(ops.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        if not (isinstance(delta, int | float) and delta > 0):
            raise ConfigError(f"the delta of HuberLoss is {delta!r}, expected a number of more than 0")
        self.keep(reduction, delta=delta)


class KLDivLoss(Reduced):
    """See `ops.kl_div`: the input is log-probabilities."""

    kind = "distribution"
    function = staticmethod(ops.kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        self.keep(reduction, log_target=log_target)


class BCELoss(Reduced):
    """See `ops.binary_cross_entropy`: the input is probabilities."""

    kind, outputs_are = "binary", "probabilities"
    bounds = (0.0, 1.0)
    function = staticmethod(ops.binary_cross_entropy)

    def __init__(self, weight: Any = None, reduction: str = "mean"):
        self.keep(reduction, weight=weight)


class BCEWithLogitsLoss(Reduced):
    """See `ops.binary_cross_entropy_with_logits_loss`."""

    kind = "binary"
    bounds = (0.0, 1.0)
    function = staticmethod(ops.binary_cross_entropy_with_logits_loss)

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None):
        self.keep(reduction, weight=weight, pos_weight=pos_weight)


class PoissonNLLLoss(Reduced):
    """See `ops.poisson_nll_loss`."""

    bounds = (0.0, math.inf)
    function = staticmethod(ops.poisson_nll_loss)

    def __init__(self, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"):
        self.keep(reduction, log_input=log_input, full=full, eps=eps)


class SoftMarginLoss(Reduced):
    """See `ops.soft_margin_loss`: targets are 1 and -1."""

    among = (1.0, -1.0)
    function = staticmethod(ops.soft_margin_loss)


class HingeEmbeddingLoss(Reduced):
    """See `ops.hinge_embedding_loss`: targets are 1 and -1."""

    among = (1.0, -1.0)
    function = staticmethod(ops.hinge_embedding_loss)

    def __init__(self, margin: float = 1.0, reduction: str = "mean"):
        self.keep(reduction, margin=margin)


class PerRow(Reduced):
    """One term a row."""

    def count(self, target: Array) -> int:
        return math.prod(target.shape[:-1])


class MultiLabelMarginLoss(PerRow):
    """See `ops.multilabel_margin_loss`: integer labels, of which -1 ends a row's."""

    function = staticmethod(ops.multilabel_margin_loss)

    @door
    def __call__(self, output: Any, target: Any) -> Tensor:
        return ops.multilabel_margin_loss(output, target, reduction=self.reduction)


class MultiLabelSoftMarginLoss(PerRow):
    """See `ops.multilabel_soft_margin_loss`."""

    kind = "binary"
    bounds = (0.0, 1.0)
    function = staticmethod(ops.multilabel_soft_margin_loss)

    def __init__(self, weight: Any = None, reduction: str = "mean"):
        self.keep(reduction, weight=weight)


class DiceLoss(Reduced):
    """See `ops.dice_loss`: one term a sample, so that its sum is one over rows; probabilities."""

    kind, outputs_are = "binary", "probabilities"
    bounds = (0.0, 1.0)
    function = staticmethod(ops.dice_loss)

    def __init__(self, eps: float = 1.0, reduction: str = "mean"):
        self.keep(reduction, eps=eps)

    def count(self, target: Array) -> int:
        return int(target.shape[0])


class Classes(Reduced):
    """Labels, with a weight for each class; their count is the sum of the weights of the labels that count."""

    kind = "classes"

    def __init__(self, weight: Any, ignore_index: int | None, reduction: str, dim: int, **more: Any):
        self.keep(reduction, weight=weight, ignore_index=ignore_index, dim=dim, **more)
        self.ignore_index, self.counted_weight = ignore_index, weight

    def count(self, target: Array) -> Any:
        return count_of_labels(target, self.counted_weight, self.ignore_index)


class NLLLoss(Classes):
    """See `ops.nll_loss`: the input is log-probabilities."""

    function = staticmethod(ops.nll_loss)

    def __init__(self, weight: Any = None, ignore_index: int | None = -100, reduction: str = "mean", *, dim: int = 1):
        super().__init__(weight, ignore_index, reduction, dim)


class CrossEntropyLoss(Classes):
    """See `ops.cross_entropy_loss`: logits; labels, or the probability of each class."""

    function = staticmethod(ops.cross_entropy_loss)

    def __init__(self, weight: Any = None, ignore_index: int | None = -100, reduction: str = "mean", label_smoothing: float = 0.0,
                 *, dim: int = 1):
        super().__init__(weight, ignore_index, reduction, dim, label_smoothing=label_smoothing)


class FocalLoss(Classes):
    """See `ops.focal_loss`; its count is the number of labels, whatever they weigh."""

    function = staticmethod(ops.focal_loss)

    def __init__(self, gamma: float = 2.0, weight: Any = None, ignore_index: int | None = -100, reduction: str = "mean", *,
                 dim: int = 1):
        super().__init__(weight, ignore_index, reduction, dim, gamma=gamma)
        self.counted_weight = None


class MultiMarginLoss(Reduced):
    """See `ops.multi_margin_loss`; one term a label."""

    kind, outputs_are = "classes", "scores"
    function = staticmethod(ops.multi_margin_loss)

    def __init__(self, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"):
        self.keep(reduction, p=p, margin=margin, weight=weight)


def in_runs(kind: Callable[..., Loss], **options: Any) -> Callable[..., Loss]:
    """The class with `reduction` = "sum", as `train.loss` has it; classes are in the last dim."""
    return partial(kind, reduction="sum", **options)


nll = in_runs(NLLLoss, ignore_index=None, dim=-1)
focal = in_runs(FocalLoss, ignore_index=None, dim=-1)
smooth_l1, poisson_nll, hinge_embedding = map(in_runs, (SmoothL1Loss, PoissonNLLLoss, HingeEmbeddingLoss))
soft_margin, multi_margin, dice = map(in_runs, (SoftMarginLoss, MultiMarginLoss, DiceLoss))
multilabel_margin, multilabel_soft_margin = in_runs(MultiLabelMarginLoss), in_runs(MultiLabelSoftMarginLoss)
