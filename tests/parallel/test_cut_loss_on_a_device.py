"""The loss of logits that are cut over ranks, on the stand-in for a GPU, of one rank that has all classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakegpu import counted, put

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.parallel.layers.tensor_loss import CutCrossEntropy

LOGITS, LABELS = np.random.default_rng(3).standard_normal((5, 7)), np.array([6, 0, 3, 3, 2])


def loss(logits: Any, labels: Any, smoothing: float) -> tuple[Any, Any]:
    alone: Any = SimpleNamespace(size=1, rank=0, sum=lambda table, name: table)
    x = Tensor(logits, requires_grad=True)
    made = CutCrossEntropy.apply(x, labels, smoothing=smoothing, ignore=3, group=alone, first=0, classes=7)
    made.backward()
    return made.array, x.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_is_that_of_whole_logits_and_waits_for_nothing(smoothing: float) -> None:
    whole = Tensor(LOGITS, requires_grad=True)
    wanted = ops.cross_entropy(whole, LABELS, label_smoothing=smoothing, ignore_index=3)
    wanted.backward()
    given = put(LOGITS), put(LABELS)
    with counted() as counts:
        found, gradient = loss(*given, smoothing)
    assert not counts.syncs
    np.testing.assert_allclose(found.get(), wanted.array, rtol=1e-12)
    np.testing.assert_allclose(gradient.get(), whole.grad, rtol=1e-12, atol=1e-15)


def test_a_label_that_is_no_class_makes_it_no_number() -> None:
    assert np.isnan(loss(put(LOGITS), put(np.array([6, 0, 3, 7, 2])), 0.0)[0].get())
