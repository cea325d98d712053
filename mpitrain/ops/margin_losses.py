"""Losses that want a margin between scores, or distances, as compositions of operations; see `losses` for what they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import array_module
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.ops.activation import softplus
from mpitrain.ops.choice import clip, minimum, where
from mpitrain.ops.elementwise import absolute, power, sqrt
from mpitrain.ops.inputs import as_tensor, raw
from mpitrain.ops.loss import check_labels
from mpitrain.ops.losses import (
    binary_cross_entropy_with_logits_loss,
    class_weights,
    constant,
    distance,
    labelled,
    pair,
    picked,
    reduced,
)
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import mean, sum
from mpitrain.ops.shape import expand_dims

__all__ = ["cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss",
           "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss", "triplet_margin_loss",
           "triplet_margin_with_distance_loss"]


def soft_margin_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-y x)) for y of 1 and -1."""
    x, y = pair("soft_margin_loss", input, target)
    return reduced(softplus(-(y * x)), reduction)


def hinge_embedding_loss(input: Any, target: Any, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """x where y is 1, max(0, margin - x) where it is -1."""
    x, y = pair("hinge_embedding_loss", input, target)
    zero = constant(x, 0.0)
    return reduced(where(y.array == 1, zero, above(margin - x)) + where(y.array == -1, zero, x), reduction)


def above(x: Tensor) -> Tensor:
    """max(0, x); its slope at 0 is 1, and at NaN 0, as PyTorch's clamp has it."""
    return clip(x, 0.0)


def margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    """max(0, margin - y (x1 - x2)): y is 1 where x1 should be larger, else -1."""
    d = distance("margin_ranking_loss", input1, input2)
    d, y = pair("margin_ranking_loss", d, target)
    return reduced(above(margin - y * d), reduction)


def cosine_embedding_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    """1 - cos(x1, x2) where y is 1, max(0, cos - margin) where it is -1; the vectors are in the last dim."""
    x1, x2 = pair("cosine_embedding_loss", input1, input2)
    y = raw(target)
    if y.shape != x1.shape[:-1] or not 1 <= len(x1.shape) <= 2:
        raise ShapeError(f"cosine_embedding_loss: vectors of shape {x1.shape} want targets of shape {x1.shape[:-1]}, "
                         f"found {y.shape}")
    tiny = 1e-12
    cos = sum(x1 * x2, -1) / sqrt((sum(x1 * x1, -1) + tiny) * (sum(x2 * x2, -1) + tiny))
    zero = constant(cos, 0.0)
    return reduced(where(y == 1, 1 - cos, zero) + where(y == -1, above(cos - margin), zero), reduction)


def apart(x: Tensor, y: Tensor, p: float = 2.0, eps: float = 1e-6) -> Tensor:
    """The p-norm of x - y + eps over the last dim."""
    d = absolute(x - y + eps)
    if p == math.inf:
        return largest(d, -1)
    if p == 2:
        return sqrt(sum(d * d, -1))
    return sum(d, -1) if p == 1 else power(sum(power(d, p), -1), 1 / p)


def triplet_margin_loss(anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6,
                        swap: bool = False, reduction: str = "mean") -> Tensor:
    """max(0, margin + d(anchor, positive) - d(anchor, negative)), d the p-norm (Balntas et al., 2016).

    `swap` takes the smaller of the distances of the negative from the other two.
    """
    return triplet_margin_with_distance_loss(anchor, positive, negative, margin=margin, swap=swap, reduction=reduction,
                                             distance_function=lambda x, y: apart(x, y, p, eps))


def triplet_margin_with_distance_loss(anchor: Any, positive: Any, negative: Any, *, margin: float = 1.0, swap: bool = False,
                                      distance_function: Callable[[Any, Any], Tensor] | None = None, reduction: str = "mean"
                                      ) -> Tensor:
    """`triplet_margin_loss` with a distance of your own."""
    if not margin > 0:
        raise ConfigError(f"the margin of a triplet loss is more than 0, not {margin}")
    between = distance_function or apart
    anchor, positive = pair("triplet_margin_loss", anchor, positive)
    anchor, negative = pair("triplet_margin_loss", anchor, negative)
    far = between(anchor, negative)
    if swap:
        far = minimum(far, between(positive, negative))
    return reduced(above(between(anchor, positive) - far + margin), reduction)


def rows_of(name: str, x: Any) -> Tensor:
    x = as_tensor(x)
    if not 0 < len(x.shape) <= 2:
        raise ShapeError(f"{name}: expected (C,) or (rows, C), found shape {x.shape}")
    return x


def multi_margin_loss(input: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"
                      ) -> Tensor:
    """sum over other classes of w[label] max(0, margin - x[label] + x)^p, over the number of classes."""
    if p not in (1, 2):
        raise ConfigError(f"the p of multi_margin_loss is 1 or 2, not {p}")
    single = len(as_tensor(input).shape) == 1
    x = rows_of("multi_margin_loss", input)
    x = x.reshape(1, x.shape[0]) if single else x
    labels, _ = labelled("multi_margin_loss", x, raw(target).reshape(-1) if single else target, None)
    over = above(x - picked(x, labels).reshape(len(labels), 1) + margin)
    over = over if p == 1 else over * over
    others = constant(x, 1.0) - (array_module(x.array).arange(x.shape[1]) == labels[:, None])
    terms = sum(over * others.astype(x.dtype), 1) * (1.0 / x.shape[1])
    terms = terms if weight is None else terms * class_weights("multi_margin_loss", x, weight)[labels]
    return reduced(terms.reshape(()) if single else terms, reduction)


def multilabel_margin_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """sum over labels j and other classes k of max(0, 1 - x[j] + x[k]), over the number of classes; -1 ends a row's labels."""
    x, labels = rows_of("multilabel_margin_loss", input), raw(target)
    if labels.shape != x.shape or labels.dtype.kind not in "iu":
        raise ShapeError(f"multilabel_margin_loss: an input of shape {x.shape} wants integer labels of that shape, found "
                         f"{labels.dtype} of shape {labels.shape}")
    shape, xp = x.shape, array_module(x.array)
    classes = shape[-1]
    x, labels = x.reshape(math.prod(shape[:-1]), classes), labels.reshape(-1, classes)
    listed = xp.cumsum(labels < 0, axis=1) == 0
    if xp is np:                                                # a device would have to be waited for: the loss is NaN
        check_labels(xp.where(listed, labels, 0).reshape(-1), classes, None, labels)
    times = (listed[:, :, None] & (labels[:, :, None] == xp.arange(classes))).sum(1)   # (rows, class): how often it is listed
    gaps = above(1 - expand_dims(x, 2) + expand_dims(x, 1))                        # (rows, label j, class k)
    counted = (times[:, :, None] * (times[:, None] == 0)).astype(x.dtype)
    if xp is not np:
        counted = xp.where((listed & (labels >= classes)).any(axis=1)[:, None, None], math.nan, counted).astype(x.dtype)
    return reduced((sum(gaps * counted, (1, 2)) * (1.0 / classes)).reshape(shape[:-1]), reduction)


def multilabel_soft_margin_loss(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy of logits, its mean over the classes (the last dim) of each row."""
    terms = binary_cross_entropy_with_logits_loss(input, target, weight, "none")
    return reduced(mean(terms, -1), reduction)
