"""Softmax and the losses against PyTorch and against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import apart, check, check_gradient, normal, positive, torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import DataError, ShapeError

SHAPES = [((3, 4), -1), ((3, 4), 0), ((2, 3, 40), 1), ((2, 3, 40), 2), ((5,), 0), ((3, 1), -1), ((0, 3), -1), ((2, 0), 0)]
LABELS = np.array([3, 0, 36, 7])


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_equals_torch(name: str, shape: tuple[int, ...], dim: int) -> None:
    check(lambda x: getattr(ops, name)(x, dim), lambda x: getattr(torch, name)(x, dim), 5 * normal(*shape))
    check_gradient(lambda x: getattr(ops, name)(x, dim), shape)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_does_not_overflow(name: str) -> None:
    check(getattr(ops, name), lambda x: getattr(torch, name)(x, -1), np.array([[1000.0, 999, -1000], [-2000, -2001, -2000]]))


def test_softmax_takes_minus_infinity_for_never() -> None:
    check(ops.softmax, lambda x: torch.softmax(x, -1), np.array([[0.0, -np.inf, 1], [-np.inf, 5, -np.inf]]))


def test_softmax_hands_nan_on() -> None:
    assert np.isnan(ops.softmax(np.array([[1.0, np.nan, 2.0] + [0.0] * 20])).array).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, 3, -1])
def test_cross_entropy_equals_torch(smoothing: float, ignore: int | None) -> None:
    labels = np.where(LABELS == 7, ignore, LABELS) if ignore == -1 else LABELS

    def theirs(x: Any, t: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, t, reduction="sum", label_smoothing=smoothing,
                                                 ignore_index=-100 if ignore is None else ignore)

    def ours(x: Any, t: Any) -> Any:
        return ops.cross_entropy(x, t, label_smoothing=smoothing, ignore_index=ignore)
    check(ours, theirs, 5 * normal(4, 37), labels)
    check_gradient(lambda x: ours(x, labels), (4, 37))
    assert ops.cross_entropy_count(labels, ignore_index=ignore) == (4 if ignore is None else 3)


def test_cross_entropy_takes_more_dims_and_other_integers() -> None:
    labels = np.array([[0, 2, 1], [1, 1, 0]], np.uint8)

    def theirs(x: Any) -> Any:
        flat = torch.tensor(labels.reshape(6).astype(int))
        return torch.nn.functional.cross_entropy(x.reshape(6, 3), flat, reduction="sum")
    check(lambda x: ops.cross_entropy(x, labels), theirs, (2, 3, 3))


def test_cross_entropy_of_no_rows_is_zero() -> None:
    x = Tensor(np.ones((0, 3)), requires_grad=True)
    loss = ops.cross_entropy(x, np.zeros(0, np.int64))
    loss.backward()
    assert loss.item() == 0 and x.grad.shape == (0, 3)


def test_cross_entropy_does_not_overflow() -> None:
    check(lambda x: ops.cross_entropy(x, np.array([1, 0])),
          lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([1, 0]), reduction="sum"),
          np.array([[1000.0, 0, -1000], [-3000, -3000, -3001]]))


def test_cross_entropy_of_a_scaled_loss() -> None:
    check(lambda x: ops.cross_entropy(x, LABELS) * 0.25,
          lambda x: torch.nn.functional.cross_entropy(x, torch.tensor(LABELS), reduction="sum") * 0.25, (4, 37))


LOSSES = {
    "mse": (ops.mse, lambda x, y: torch.nn.functional.mse_loss(x, y, reduction="sum")),
    "l1": (ops.l1, lambda x, y: torch.nn.functional.l1_loss(x, y, reduction="sum")),
    "huber": (ops.huber, lambda x, y: torch.nn.functional.huber_loss(x, y, reduction="sum")),
    "narrow huber": (lambda x, y: ops.huber(x, y, delta=0.3),
                     lambda x, y: torch.nn.functional.huber_loss(x, y, reduction="sum", delta=0.3)),
    "binary_cross_entropy": (ops.binary_cross_entropy_with_logits,
                             lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="sum")),
}


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_torch(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = LOSSES[name]
    target = positive(*shape, seed=7) / 2 if name.startswith("binary") else normal(*shape, seed=7)
    check(ours, theirs, 3 * normal(*shape), target)
    check_gradient(ours, apart(*shape), target)


def test_binary_cross_entropy_does_not_overflow() -> None:
    ours, theirs = LOSSES["binary_cross_entropy"]
    check(ours, theirs, np.array([1000.0, -1000, 0]), np.array([0.0, 1, 0.5]))


def test_kl_divergence_equals_torch_also_where_p_is_zero() -> None:
    def theirs(log_q: Any, p: Any) -> Any:
        return torch.nn.functional.kl_div(log_q, p, reduction="sum")
    check(ops.kl_divergence, theirs, (3, 4), positive(3, 4))
    p = np.array([0.0, 0.25, 0.75])
    check(lambda q: ops.kl_divergence(q, p.astype(q.dtype)), lambda q: theirs(q, torch.tensor(p)), (3,))
    check_gradient(ops.kl_divergence, (3, 4), positive(3, 4))


def test_element_count_counts_the_terms_of_the_other_losses() -> None:
    assert ops.element_count(Tensor(np.ones((3, 4)))) == 12


def test_a_label_out_of_range_is_named_with_its_row() -> None:
    with pytest.raises(DataError, match=r"row=1: label 3 is not in 0 ... 2: the model has 3 classes"):
        ops.cross_entropy(np.ones((2, 2, 3)), np.array([[0, 1], [2, 3]]))
    with pytest.raises(DataError, match=r"row=0: label -1 is not in 0 ... 2"):
        ops.cross_entropy(np.ones((1, 3)), np.array([-1]), ignore_index=-2)


def test_labels_of_another_shape_or_kind_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"logits of shape \(2, 3\) want integer labels of shape \(2,\), found int64 of shape "
                                         r"\(3,\)"):
        ops.cross_entropy(np.ones((2, 3)), np.zeros(3, np.int64))
    with pytest.raises(ShapeError, match="want integer labels .* found float64"):
        ops.cross_entropy(np.ones((2, 3)), np.zeros(2))


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "binary_cross_entropy_with_logits", "kl_divergence"])
def test_losses_refuse_to_broadcast(name: str) -> None:
    with pytest.raises(ShapeError, match=rf"{name}: shapes \(4,\) and \(4, 1\) differ; they must be equal"):
        getattr(ops, name)(np.ones(4), np.ones((4, 1)))


def test_a_dim_that_is_not_there_is_named() -> None:
    with pytest.raises(ShapeError, match=r"softmax: dim 2 of an array with 2 dims, shape \(2, 3\)"):
        ops.softmax(np.ones((2, 3)), 2)
