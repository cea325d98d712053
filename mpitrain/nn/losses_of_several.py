"""PyTorch's losses of several inputs (pairs, triplets, mean and variance, sequences) as classes; see `losses`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import GraphError, ShapeError
from mpitrain.nn.loss import Loss
from mpitrain.nn.losses import as_output, in_runs
from mpitrain.ops.inputs import door

__all__ = ["CTCLoss", "CosineEmbeddingLoss", "GaussianNLLLoss", "MarginRankingLoss", "TripletMarginLoss",
           "TripletMarginWithDistanceLoss"]


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

    @door
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

    among = (1.0, -1.0)

    def __init__(self, margin: float = 0.0, reduction: str = "mean"):
        super().__init__(reduction, margin=margin)

    def terms(self, *inputs: Any) -> Tensor:
        first, second, target = inputs
        return ops.cosine_embedding_loss(first, second, rows_of(target, first.shape[:-1]), reduction=self.reduction,
                                         **self.options)


class MarginRankingLoss(Several):
    """See `ops.margin_ranking_loss`: two numbers, and 1 or -1."""

    among = (1.0, -1.0)

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

    @door
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

    @door
    def __call__(self, *inputs: Any) -> Tensor:
        if len(inputs) != 2:
            return ops.ctc_loss(*inputs, reduction=self.reduction, **self.options)
        output, target = inputs
        labels = target.array if isinstance(target, Tensor) else target
        if len(output.shape) != 3 or labels.ndim != 2:
            raise ShapeError(f"CTCLoss: in a run it wants logits (B, T, C) and labels (B, S), found outputs {output.shape} and "
                             f"labels {labels.shape}")
        lengths = np.cumprod(labels >= 0, axis=1).sum(axis=1)
        log_p = ops.log_softmax(ops.swapaxes(output, 0, 1))
        return ops.ctc_loss(log_p, labels.astype(np.int64), [output.shape[1]] * output.shape[0], lengths,
                            reduction=self.reduction, **self.options)


def rows_of(target: Any, shape: Sequence[int]) -> Any:
    """The target of a run, (B,) or (B, 1), in the shape of what it is for."""
    return target if isinstance(target, Tensor) or tuple(target.shape) == tuple(shape) else target.reshape(shape)


gaussian_nll, ctc, triplet, cosine_embedding, margin_ranking = map(in_runs, (
    GaussianNLLLoss, CTCLoss, TripletMarginLoss, CosineEmbeddingLoss, MarginRankingLoss))
