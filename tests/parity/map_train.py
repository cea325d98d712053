"""Losses: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Absent

from mpitrain import ops


def reduction_of(size_average: Any, reduce: Any, reduction: str) -> str:
    """PyTorch's old pair of arguments as the new one."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", **kwargs: Any) -> Any:
        return function(*args, reduction=reduction_of(size_average, reduce, reduction), **kwargs)
    return call


def with_distance(anchor: Any, positive: Any, negative: Any, *, distance_function: Any = None, **kwargs: Any) -> Any:
    """PyTorch's samples bring a module of its own as the distance."""
    if distance_function is not None and type(distance_function).__name__ != "PairwiseDistance":
        raise Absent(type(distance_function).__name__)
    return ops.triplet_margin_with_distance_loss(anchor, positive, negative, **kwargs)


NAMES = """cross_entropy:cross_entropy_loss binary_cross_entropy
    binary_cross_entropy_with_logits:binary_cross_entropy_with_logits_loss soft_margin_loss margin_ranking_loss
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss
    smooth_l1_loss l1_loss mse_loss ctc_loss cosine_embedding_loss nll_loss gaussian_nll_loss hinge_embedding_loss huber_loss
    poisson_nll_loss kl_div"""

MAP: dict[str, Callable[..., Any]] = {
    **{f"nn.functional.{name.partition(':')[0]}": loss(getattr(ops, name.partition(":")[2] or name)) for name in NAMES.split()},
    "nn.functional.triplet_margin_with_distance_loss": with_distance,
}
