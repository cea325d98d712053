"""Losses: sums and counts against PyTorch's, and shapes that would broadcast are refused."""

import numpy as np
import pytest

from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.nn import LOSSES, Loss

torch = pytest.importorskip("torch")
F = torch.nn.functional
LOGITS = np.random.default_rng(0).standard_normal((3, 4, 5))
LABELS = np.random.default_rng(1).integers(0, 5, (3, 4))
NUMBERS = np.random.default_rng(2).standard_normal((3, 4, 5))
CHANCES = np.random.default_rng(3).uniform(0, 1, (3, 4, 5))
DISTRIBUTIONS = CHANCES / CHANCES.sum(-1, keepdims=True)


def flat(x):
    return x.reshape(-1, 5)


CASES = {
    "cross_entropy": ({}, LABELS, 12, lambda x: F.cross_entropy(flat(x), torch.tensor(LABELS.ravel()), reduction="sum")),
    "cross_entropy smooth": ({"label_smoothing": 0.1, "ignore_index": 2}, LABELS, int((LABELS != 2).sum()),
                             lambda x: F.cross_entropy(flat(x), torch.tensor(LABELS.ravel()), reduction="sum",
                                                       label_smoothing=0.1, ignore_index=2)),
    "mse": ({}, NUMBERS, 60, lambda x: F.mse_loss(x, torch.tensor(NUMBERS), reduction="sum")),
    "l1": ({}, NUMBERS, 60, lambda x: F.l1_loss(x, torch.tensor(NUMBERS), reduction="sum")),
    "huber": ({"delta": 0.7}, NUMBERS, 60, lambda x: F.huber_loss(x, torch.tensor(NUMBERS), reduction="sum", delta=0.7)),
    "binary_cross_entropy": ({}, CHANCES, 60,
                             lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor(CHANCES), reduction="sum")),
    "kl": ({}, DISTRIBUTIONS, 12, lambda x: F.kl_div(x.log_softmax(-1), torch.tensor(DISTRIBUTIONS), reduction="sum")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_pytorch_s_sum_and_knows_its_count(case):
    options, target, count, theirs = CASES[case]
    loss = LOSSES[case.split()[0]](**options)
    mine, other = Tensor(LOGITS, requires_grad=True), torch.tensor(LOGITS, requires_grad=True)
    total, expected = loss(mine, target), theirs(other)
    assert total.shape == () and total.item() == pytest.approx(expected.item(), rel=1e-12)
    total.backward()
    expected.backward()
    np.testing.assert_allclose(mine.grad, other.grad.numpy(), rtol=0, atol=1e-12)
    assert loss.count(target) == count


def test_every_loss_says_what_its_targets_are():
    assert {name: make().kind for name, make in ((n, LOSSES[n]) for n in LOSSES)} == {
        "cross_entropy": "classes", "mse": "values", "l1": "values", "huber": "values",
        "binary_cross_entropy": "binary", "kl": "distribution", "smooth_l1": "values", "poisson_nll": "values",
        "hinge_embedding": "values", "soft_margin": "values", "multilabel_margin": "values", "multilabel_soft_margin": "binary",
        "dice": "binary", "nll": "classes", "focal": "classes", "multi_margin": "classes",
        **dict.fromkeys(("gaussian_nll", "ctc", "triplet", "cosine_embedding", "margin_ranking", "elbo"), "rows"),
        "relative_l2": "values"}


def test_a_column_of_outputs_meets_a_row_of_targets_and_their_dtype_is_the_outputs():
    output = Tensor(np.arange(3, dtype=np.float32).reshape(3, 1), requires_grad=True)
    assert LOSSES["mse"]()(output, np.array([0, 1, 4])).item() == 4.0


def test_what_would_broadcast_is_refused():
    with pytest.raises(ShapeError, match=r"output has shape \(3, 1\), the target \(4,\); they must be equal"):
        LOSSES["mse"]()(Tensor(np.zeros((3, 1))), np.zeros(4))


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match=r"label_smoothing lies in \[0, 1\], not 2"):
        LOSSES["cross_entropy"](label_smoothing=2)
    with pytest.raises(ConfigError, match="the delta of the huber loss is more than 0, not 0"):
        LOSSES["huber"](delta=0)
    with pytest.raises(ConfigError, match='the elbo loss has a reconstruction of binary or normal, not "poisson"'):
        LOSSES["elbo"](reconstruction="poisson")
    with pytest.raises(ConfigError, match="the beta of the elbo loss is a number of 0 or more, not -1"):
        LOSSES["elbo"](beta=-1)
    with pytest.raises(GraphError, match="Loss defines no total"):
        Loss()(Tensor(np.zeros(2)), np.zeros(2))
