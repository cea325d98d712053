"""Losses beyond PyTorch's databases: formulas, the sum over rows that a run needs, second derivatives, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from mpitrain import gradcheck, nn, ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.train.build.trial import try_loss

RNG = np.random.default_rng(3)
SIGNS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
LABELS = np.array([0, 2, 1, 3, 3, 0])


def positive(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.uniform(0.1, 0.9, shape)


RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {          # output, target, arguments: six rows of each loss of the registry
    "cross_entropy": (RNG.standard_normal((6, 4)), LABELS, {"weight": [1.0, 0.5, 2.0, 3.0], "label_smoothing": 0.1}),
    "nll": (np.log(positive(6, 4)), LABELS, {"weight": [1.0, 0.5, 2.0, 3.0], "ignore_index": 1}),
    "focal": (RNG.standard_normal((6, 4)), LABELS, {"gamma": 1.5}),
    "multi_margin": (RNG.standard_normal((6, 4)), LABELS, {"p": 2}),
    "mse": (RNG.standard_normal((6, 4)), positive(6, 4), {}), "l1": (RNG.standard_normal((6, 4)), positive(6, 4), {}),
    "huber": (RNG.standard_normal((6, 4)), positive(6, 4), {}), "kl": (RNG.standard_normal((6, 4)), positive(6, 4), {}),
    "smooth_l1": (RNG.standard_normal((6, 1)), positive(6), {"beta": 0.3}),
    "poisson_nll": (RNG.standard_normal((6, 4)), positive(6, 4), {"full": True}),
    "gaussian_nll": (positive(6, 2, 4), positive(6, 4), {}),
    "binary_cross_entropy": (RNG.standard_normal((6, 4)), positive(6, 4), {"pos_weight": [1.0, 2.0, 3.0, 0.5]}),
    "hinge_embedding": (RNG.standard_normal(6), SIGNS, {}), "soft_margin": (RNG.standard_normal((6, 1)), SIGNS, {}),
    "margin_ranking": (RNG.standard_normal((6, 2)), SIGNS, {"margin": 0.2}),
    "cosine_embedding": (RNG.standard_normal((6, 2, 4)), SIGNS, {"margin": 0.1}),
    "triplet": (RNG.standard_normal((6, 3, 4)), LABELS, {"swap": True}),
    "multilabel_margin": (RNG.standard_normal((6, 4)), np.array([[3, 0, -1, 1]] * 6), {}),
    "multilabel_soft_margin": (RNG.standard_normal((6, 4)), (positive(6, 4) > 0.5) * 1.0, {}),
    "dice": (positive(6, 2, 3), (positive(6, 2, 3) > 0.5) * 1.0, {}),
    "relative_l2": (RNG.standard_normal((6, 2, 3)), positive(6, 2, 3), {}),
    "elbo": (RNG.standard_normal((6, 6 + 4)), positive(6, 2, 3), {"beta": 0.7}),
    "ctc": (RNG.standard_normal((6, 7, 5)),
            np.array([[1, 2, 2], [3, -1, -1], [-1, -1, -1], [1, 2, 3], [4, 4, -1], [2, 1, 2]]), {}),
}


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_the_weights_of_labels_are_counted_without_those_that_are_ignored(name: str) -> None:
    loss = nn.LOSSES[name](weight=[1.0, 0.5, 4.0], ignore_index=1)
    assert loss.count(np.array([0, 1, 2, 2])) == 9.0 and loss.count(Tensor(np.array([[0], [1]]))) == 1.0
    for label in (3, -1):
        with pytest.raises(ShapeError, match=f"a label is {label}, and there are weights for 3 classes, 0 to 2"):
            loss.count(np.array([0, label]))


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("gap", [-3.0, 2.0, 14.0, 40.0, 800.0])
def test_the_gradient_of_the_focal_loss_is_finite_up_to_certainty(gamma: float, gap: float) -> None:
    """Against the derivative in closed form, by the gap z between two logits; where p is 1 both are 0, the limit."""
    x = Tensor(np.array([[gap, 0.0]], np.float32), requires_grad=True)
    loss = nn.LOSSES["focal"](gamma=gamma)(x, np.array([0]))
    loss.backward()
    rest, log_p = 1 / (1 + math.exp(min(gap, 700))), -math.log1p(math.exp(-gap))
    slope = 0.0 if rest < 1e-300 else rest ** gamma * (gamma * (1 - rest) * log_p - rest)
    assert float(loss) == pytest.approx(-rest ** gamma * log_p, rel=1e-4, abs=1e-7)
    np.testing.assert_allclose(x.grad, [[slope, -slope]], rtol=1e-4, atol=3e-8 ** min(1, gamma or 1))


def test_every_loss_of_a_run_is_tried_here() -> None:
    assert set(RUNS) == set(nn.LOSSES)


@pytest.mark.parametrize("name", RUNS)
def test_a_loss_of_a_run_is_the_sum_over_its_rows_and_so_is_its_count(name: str) -> None:
    output, target, arguments = RUNS[name]
    loss = nn.LOSSES[name](**arguments)
    whole, count = loss(Tensor(output), target), loss.count(target)
    parts = [(float(loss(Tensor(output[a:b]), target[a:b])), loss.count(target[a:b])) for a, b in ((0, 1), (1, 4), (4, 6))]
    assert whole.shape == () and float(whole) == pytest.approx(sum(p for p, _ in parts), rel=1e-12)
    assert count == pytest.approx(sum(c for _, c in parts), rel=1e-12) and count > 0
    gradcheck(lambda x: loss(x, target), output)


@pytest.mark.parametrize("name", sorted(set(RUNS) - {"ctc", "l1", "multi_margin"}))
def test_a_loss_has_a_second_derivative(name: str) -> None:
    output, target, arguments = RUNS[name]
    loss, direction, step = nn.LOSSES[name](**arguments), RNG.standard_normal(output.shape), 1e-6

    def slope(x: Any, more: bool = False) -> Any:
        x = Tensor(x, requires_grad=True)
        found, = grad(loss(x, target), x, create_graph=more)
        return (found, x) if more else found.array
    found, x = slope(output, more=True)
    if not found.requires_grad:                  # a straight line
        assert np.allclose(slope(output + step * direction), slope(output - step * direction))
        return
    again, = grad((found * direction).sum(), x)
    bent = float((again.array * direction).sum())
    differences = ((slope(output + step * direction) - slope(output - step * direction)) * direction).sum() / (2 * step)
    assert bent == pytest.approx(float(differences), rel=1e-5, abs=1e-7)


def test_ctc_is_the_sum_over_all_alignments() -> None:
    """Each of the 4^5 paths of 5 times is collapsed by hand; one label repeats, and one sample has no labels."""
    p = RNG.dirichlet(np.ones(4), size=(5, 2))
    targets = [[2, 2], []]
    expected = []
    for i, wanted in enumerate(targets):
        total = 0.0
        for path in itertools.product(range(4), repeat=5):
            collapsed = [label for label, _ in itertools.groupby(path) if label]
            total += float(np.prod(p[range(5), i, path])) if collapsed == wanted else 0.0
        expected.append(-np.log(total))
    found = ops.ctc_loss(np.log(p), np.array([[2, 2], [1, 1]]), [5, 5], [2, 0], reduction="none")
    np.testing.assert_allclose(found.array, expected, rtol=1e-12)


def test_a_sample_too_short_for_its_labels_costs_infinity_or_nothing() -> None:
    log_p = Tensor(np.log(RNG.dirichlet(np.ones(4), size=(2, 1))), requires_grad=True)
    assert np.isinf(float(ops.ctc_loss(log_p, np.array([[1, 1]]), [2], [2], reduction="sum")))
    loss = ops.ctc_loss(log_p, np.array([[1, 1]]), [2], [2], reduction="sum", zero_infinity=True)
    loss.backward()
    assert float(loss) == 0 and not log_p.grad.any()


def test_the_weighted_mean_divides_by_the_weights_of_the_labels_that_count() -> None:
    logits, weight = RNG.standard_normal((6, 4)), [1.0, 0.5, 2.0, 3.0]
    loss = nn.LOSSES["cross_entropy"](weight=weight, ignore_index=3)
    mean = float(nn.CrossEntropyLoss(weight, ignore_index=3)(Tensor(logits), LABELS))
    assert float(loss(Tensor(logits), LABELS)) / loss.count(LABELS) == pytest.approx(mean, rel=1e-12)
    assert loss.count(LABELS) == 1.0 + 2.0 + 0.5 + 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [[-1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [2, -1, -1]])
def test_class_weights_of_layers_may_be_any_numbers_as_pytorchs(weight: list[float], reduction: str) -> None:
    torch = pytest.importorskip("torch")
    x, target = RNG.standard_normal((5, 3)), np.array([0, 2, 1, 1, 2])
    labels, each = torch.tensor(target), torch.tensor(weight, dtype=torch.float64)
    for name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"):
        ours = getattr(nn, name)(weight=weight, reduction=reduction)(Tensor(x), target)
        theirs = getattr(torch.nn, name)(weight=each, reduction=reduction)(torch.tensor(x), labels)
        np.testing.assert_allclose(ours.array, theirs.numpy(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(("name", "weight", "fine"), [
    ("cross_entropy", [1.0, -1.0, 2.0], False), ("nll", [1.0, -1.0, 2.0], False), ("nll", [0.0, 0.0, 0.0], False),
    ("nll", [[1.0], [2.0, 3.0]], False), ("nll", "abc", False), ("nll", [1.0, math.nan, 1.0], False),
    ("nll", [0.0, 0.5, 2.0], True), ("focal", [1.0, -1.0, 2.0], True), ("multi_margin", [1.0, -1.0, 2.0], True)])
def test_a_run_that_divides_by_class_weights_wants_them_0_or_more(name: str, weight: Any, fine: bool) -> None:
    x, target = Tensor(np.log(positive(5, 3))), np.array([0, 2, 1, 1, 2])
    loss = nn.LOSSES[name](weight=weight)
    if fine:
        assert try_loss(loss, [x], target, target) == ""
        return
    with pytest.raises(ConfigError, match=r"weight has a number for each class, 0 or more, and not all 0, found [a\[]"):
        try_loss(loss, [x], target, target)


@pytest.mark.parametrize("weight", [[1.0, 2.0], [1.0] * 4, [[1.0, 2.0, 3.0]], 2.0, ["a", "b", "c"], [1.0, 2.0, 3j],
                                    np.array([1, 2, 3j]), [[1.0], [2.0, 3.0]]])
def test_weights_that_are_not_a_number_for_each_class_are_refused_in_one_line(weight: Any) -> None:
    x, target = Tensor(np.ones((2, 3))), np.array([0, 2])
    for loss in (ops.nll_loss, ops.cross_entropy_loss, ops.focal_loss, ops.multi_margin_loss):
        with pytest.raises(ShapeError, match=r"give one for each|wants a real number or an array of them"):
            loss(x, target, weight=weight)
    with pytest.raises(ShapeError, match=r"give one for each|wants a real number or an array of them"):
        ops.cross_entropy_loss(x, Tensor(np.ones((2, 3)) / 3), weight=weight)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    x = Tensor(np.ones((2, 3)))
    for wrong, kind in ((lambda: ops.mse_loss(x, np.ones(3)), ShapeError), (lambda: ops.nll_loss(x, np.array([0, 3])), DataError),
                        (lambda: ops.nll_loss(x, np.array([0.0, 1.0])), ShapeError),
                        (lambda: ops.l1_loss(x, x, "avg"), ConfigError),
                        (lambda: ops.nll_loss(x, np.array([0, 1]), [1.0, 2.0]), ShapeError),
                        (lambda: ops.ctc_loss(x, np.array([1, 5]), [2], [2]), ShapeError),
                        (lambda: ops.triplet_margin_loss(x, x, np.ones((2, 2))), ShapeError),
                        (lambda: nn.TripletMarginLoss()(Tensor(np.ones((2, 5))), np.ones(2)), ShapeError)):
        with pytest.raises(kind) as found:
            wrong()
        assert "\n" not in str(found.value)
    with pytest.raises(ConfigError, match='set reduction = "sum"'):
        try_loss(nn.MSELoss(), [x], np.ones((2, 3)), np.ones((2, 3)))
