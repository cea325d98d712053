"""PyTorch's losses as classes, and in runs: `train.loss` names them with `reduction` = "sum", as a run needs it.

The functions are those of `ops.losses` and `ops.ctc`. A run divides the sum over all rows of all ranks by the sum of their
counts, once, so `count` is what the "mean" of PyTorch divides by: of weighted labels the sum of their weights. Losses of several
inputs (pairs, triplets, mean and variance) take them one by one, or in a run stacked along dim 1 of the model's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import GraphError, ShapeError
from mpitrain.nn.loss import Loss

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CTCLoss", "CosineEmbeddingLoss", "CrossEntropyLoss", "DiceLoss", "FocalLoss",
           "GaussianNLLLoss", "HingeEmbeddingLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "MarginRankingLoss",
           "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "NLLLoss", "PoissonNLLLoss", "SmoothL1Loss",
           "SoftMarginLoss", "TripletMarginLoss", "TripletMarginWithDistanceLoss"]


class Reduced(Loss):
    """A loss whose terms are `function(output, target, **options)`; one for each element of the target."""

    function: Callable[..., Tensor]

    def __init__(self, reduction: str = "mean", **options: Any):
        self.reduction, self.options = reduction, options

    def __call__(self, output: Any, target: Any) -> Tensor:
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
        super().__init__(reduction, beta=beta)


class HuberLoss(Reduced):
    """See `ops.huber_loss`."""

    function = staticmethod(ops.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        super().__init__(reduction, delta=delta)


class KLDivLoss(Reduced):
    """See `ops.kl_div`: the input is log-probabilities."""

    kind = "distribution"
    function = staticmethod(ops.kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        super().__init__(reduction, log_target=log_target)


class BCELoss(Reduced):
    """See `ops.binary_cross_entropy`: the input is probabilities."""

    kind = "binary"
    function = staticmethod(ops.binary_cross_entropy)

    def __init__(self, weight: Any = None, reduction: str = "mean"):
        super().__init__(reduction, weight=weight)


class BCEWithLogitsLoss(Reduced):
    """See `ops.binary_cross_entropy_with_logits_loss`."""

    kind = "binary"
    function = staticmethod(ops.binary_cross_entropy_with_logits_loss)

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None):
        super().__init__(reduction, weight=weight, pos_weight=pos_weight)


class PoissonNLLLoss(Reduced):
    """See `ops.poisson_nll_loss`."""

    function = staticmethod(ops.poisson_nll_loss)

    def __init__(self, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"):
        super().__init__(reduction, log_input=log_input, full=full, eps=eps)


class SoftMarginLoss(Reduced):
    """See `ops.soft_margin_loss`: targets are 1 and -1."""

    function = staticmethod(ops.soft_margin_loss)


class HingeEmbeddingLoss(Reduced):
    """See `ops.hinge_embedding_loss`: targets are 1 and -1."""

    function = staticmethod(ops.hinge_embedding_loss)

    def __init__(self, margin: float = 1.0, reduction: str = "mean"):
        super().__init__(reduction, margin=margin)


class PerRow(Reduced):
    """One term a row."""

    def count(self, target: Array) -> int:
        return math.prod(target.shape[:-1])


class MultiLabelMarginLoss(PerRow):
    """See `ops.multilabel_margin_loss`: integer labels, of which -1 ends a row's."""

    function = staticmethod(ops.multilabel_margin_loss)

    def __call__(self, output: Any, target: Any) -> Tensor:
        return ops.multilabel_margin_loss(output, target, reduction=self.reduction)


class MultiLabelSoftMarginLoss(PerRow):
    """See `ops.multilabel_soft_margin_loss`."""

    kind = "binary"
    function = staticmethod(ops.multilabel_soft_margin_loss)

    def __init__(self, weight: Any = None, reduction: str = "mean"):
        super().__init__(reduction, weight=weight)


class DiceLoss(Reduced):
    """See `ops.dice_loss`: one term a sample, so that its sum is one over rows; probabilities."""

    kind = "binary"
    function = staticmethod(ops.dice_loss)

    def __init__(self, eps: float = 1.0, reduction: str = "mean"):
        super().__init__(reduction, eps=eps)

    def count(self, target: Array) -> int:
        return int(target.shape[0])


class Classes(Reduced):
    """Labels, with a weight for each class; their count is the sum of the weights of the labels that count."""

    kind = "classes"

    def __init__(self, weight: Any, ignore_index: int | None, reduction: str, dim: int, **more: Any):
        super().__init__(reduction, weight=weight, ignore_index=ignore_index, dim=dim, **more)

    def count(self, target: Array) -> Any:
        weight, ignore = self.options["weight"], self.options["ignore_index"]
        counted = np.ones(target.shape, bool) if ignore is None else target != ignore
        if weight is None:
            return int(counted.sum())
        given = weight.array if isinstance(weight, Tensor) else weight
        return float(np.asarray(given, np.float64)[np.where(counted, target, 0)][counted].sum())


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

    def count(self, target: Array) -> int:
        ignore = self.options["ignore_index"]
        return int(target.size if ignore is None else (target != ignore).sum())


class MultiMarginLoss(Reduced):
    """See `ops.multi_margin_loss`; one term a label."""

    kind = "classes"
    function = staticmethod(ops.multi_margin_loss)

    def __init__(self, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"):
        super().__init__(reduction, p=p, margin=margin, weight=weight)


class Several(Loss):
    """A loss of `n` inputs, one term a row: called with them, or in a run with an output (B, n, ...) and the target."""

    kind = "rows"
    n = 2
    asks_target = True

    def __init__(self, reduction: str = "mean", **options: Any):
        self.reduction, self.options = reduction, options

    def terms(self, *inputs: Any) -> Tensor:
        """The loss of the `n` inputs and, where it `asks_target`, the target."""
        raise GraphError(f"{type(self).__name__} defines no terms")

    def __call__(self, *inputs: Any) -> Tensor:
        if len(inputs) == 2 and self.n + self.asks_target > 2:
            output, target = inputs
            if len(output.shape) < 2 or output.shape[1] != self.n:
                raise ShapeError(f"{type(self).__name__}: an output of shape {output.shape} has no {self.n} inputs stacked along "
                                 f"dim 1; expected (B, {self.n}, ...)")
            inputs = tuple(output[:, i] for i in range(self.n)) + ((target,) if self.asks_target else ())
        return self.terms(*inputs)

    def count(self, target: Array) -> int:
        return int(target.shape[0])


class CosineEmbeddingLoss(Several):
    """See `ops.cosine_embedding_loss`: two vectors, and 1 or -1."""

    def __init__(self, margin: float = 0.0, reduction: str = "mean"):
        super().__init__(reduction, margin=margin)

    def terms(self, *inputs: Any) -> Tensor:
        first, second, target = inputs
        return ops.cosine_embedding_loss(first, second, rows_of(target, first.shape[:-1]), reduction=self.reduction,
                                         **self.options)


class MarginRankingLoss(Several):
    """See `ops.margin_ranking_loss`: two numbers, and 1 or -1."""

    def __init__(self, margin: float = 0.0, reduction: str = "mean"):
        super().__init__(reduction, margin=margin)

    def terms(self, *inputs: Any) -> Tensor:
        first, second, target = inputs
        return ops.margin_ranking_loss(first, second, rows_of(target, first.shape), reduction=self.reduction, **self.options)


class GaussianNLLLoss(Several):
    """See `ops.gaussian_nll_loss`: a mean, a variance, and the target; called with (input, target, var), as PyTorch's.

    One term an element of the target.
    """

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"):
        super().__init__(reduction, full=full, eps=eps)

    def __call__(self, *inputs: Any) -> Tensor:
        return super().__call__(*(inputs if len(inputs) == 2 else (inputs[0], inputs[2], inputs[1])))

    def terms(self, *inputs: Any) -> Tensor:
        middle, variance, target = inputs
        return ops.gaussian_nll_loss(middle, as_output(middle, target), variance, reduction=self.reduction, **self.options)

    def count(self, target: Array) -> int:
        return int(target.size)


class TripletMarginLoss(Several):
    """See `ops.triplet_margin_loss`: three vectors; in a run the target is not looked at."""

    n, asks_target = 3, False

    def __init__(self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, reduction: str = "mean"):
        super().__init__(reduction, margin=margin, p=p, eps=eps, swap=swap)

    def terms(self, *inputs: Any) -> Tensor:
        return ops.triplet_margin_loss(*inputs, reduction=self.reduction, **self.options)


class TripletMarginWithDistanceLoss(Several):
    """See `ops.triplet_margin_with_distance_loss`."""

    n, asks_target = 3, False

    def __init__(self, *, distance_function: Callable[[Any, Any], Tensor] | None = None, margin: float = 1.0, swap: bool = False,
                 reduction: str = "mean"):
        super().__init__(reduction, distance_function=distance_function, margin=margin, swap=swap)

    def terms(self, *inputs: Any) -> Tensor:
        return ops.triplet_margin_with_distance_loss(*inputs, reduction=self.reduction, **self.options)


class CTCLoss(Several):
    """See `ops.ctc_loss`, which it is called as; one term a sample.

    In a run the output is logits (B, T, C) of T times each, and the labels (B, S) of a sample end where one is less than 0.
    """

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False):
        super().__init__(reduction, blank=blank, zero_infinity=zero_infinity)

    def __call__(self, *inputs: Any) -> Tensor:
        if len(inputs) != 2:
            return ops.ctc_loss(*inputs, reduction=self.reduction, **self.options)
        output, target = inputs
        labels = target.array if isinstance(target, Tensor) else target
        lengths = np.cumprod(labels >= 0, axis=1).sum(axis=1)
        log_p = ops.log_softmax(ops.swapaxes(output, 0, 1))
        return ops.ctc_loss(log_p, labels.astype(np.int64), [output.shape[1]] * output.shape[0], lengths,
                            reduction=self.reduction, **self.options)


def rows_of(target: Any, shape: Sequence[int]) -> Any:
    """The target of a run, (B,) or (B, 1), in the shape of what it is for."""
    return target if isinstance(target, Tensor) or tuple(target.shape) == tuple(shape) else target.reshape(shape)


def in_runs(kind: Callable[..., Loss], **options: Any) -> Callable[..., Loss]:
    """The class with `reduction` = "sum", as `train.loss` has it; classes are in the last dim."""
    return partial(kind, reduction="sum", **options)


nll = in_runs(NLLLoss, ignore_index=None, dim=-1)
focal = in_runs(FocalLoss, ignore_index=None, dim=-1)
smooth_l1, poisson_nll, gaussian_nll, ctc = map(in_runs, (SmoothL1Loss, PoissonNLLLoss, GaussianNLLLoss, CTCLoss))
triplet, cosine_embedding, margin_ranking = map(in_runs, (TripletMarginLoss, CosineEmbeddingLoss, MarginRankingLoss))
hinge_embedding, soft_margin, multi_margin = map(in_runs, (HingeEmbeddingLoss, SoftMarginLoss, MultiMarginLoss))
multilabel_margin, multilabel_soft_margin, dice = map(in_runs, (MultiLabelMarginLoss, MultiLabelSoftMarginLoss, DiceLoss))
