"""What is kept of outputs follows from what the run's loss says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.errors import UsageError
from mpitrain.infer.forms import form

OUTPUTS = np.array([[0.2], [0.5], [0.7]], np.float32)


def loss(name: str) -> Any:
    return nn.LOSSES[name]()


def test_probabilities_are_not_taken_for_logits() -> None:
    for found in (loss("dice"), nn.BCELoss()):
        assert form("classes", found).made(OUTPUTS).tolist() == [[0], [0], [1]]
        assert np.array_equal(form("probabilities", found).made(OUTPUTS), OUTPUTS)
    for found in (loss("binary_cross_entropy"), nn.BCEWithLogitsLoss(), loss("multilabel_soft_margin")):
        assert form("classes", found).made(OUTPUTS - 0.5).tolist() == [[0], [0], [1]]
        np.testing.assert_allclose(form("probabilities", found).made(OUTPUTS), 1 / (1 + np.exp(-OUTPUTS)), rtol=1e-6)


def test_scores_have_classes_and_no_probabilities() -> None:
    found = loss("multi_margin")
    assert form("classes", found).made(np.array([[3.0, 1.0], [0.0, 0.5]])).tolist() == [0, 1]
    with pytest.raises(UsageError, match='"MultiMarginLoss" are scores; take "classes"'):
        form("probabilities", found)


def test_log_probabilities_are_logits() -> None:
    shares = np.array([[0.5, 0.25, 0.25]], np.float32)
    np.testing.assert_allclose(form("probabilities", loss("nll")).made(np.log(shares)), shares, rtol=1e-6)
