"""Covariances, angles, distances and the exponential of matrices, beside PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

rng = np.random.default_rng(0)
TIMES, COUNTS = np.array([1, 2, 1, 3, 1]), np.array([0.5, 1, 2, 0.25, 1])
F = torch.nn.functional
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "cov": (ops.cov, torch.cov, ((3, 5),)), "cov of one": (ops.cov, torch.cov, ((5,),)),
    "cov of one row": (ops.cov, torch.cov, ((1, 5),)),
    "cov, not corrected": (lambda x: ops.cov(x, correction=0), lambda x: torch.cov(x, correction=0), ((3, 5),)),
    "cov with weights": (lambda x: ops.cov(x, fweights=TIMES, aweights=COUNTS), lambda x: torch.cov(
        x, fweights=torch.tensor(TIMES), aweights=torch.tensor(COUNTS)), ((3, 5),)),
    "cov with counts": (lambda x: ops.cov(x, fweights=TIMES), lambda x: torch.cov(x, fweights=torch.tensor(TIMES)), ((2, 5),)),
    "corrcoef": (ops.corrcoef, torch.corrcoef, ((3, 5),)),
    "cosine": (ops.cosine_similarity, F.cosine_similarity, ((3, 5), (3, 5))),
    "cosine, broadcast": (lambda x, y: ops.cosine_similarity(x, y, dim=-1), lambda x, y: F.cosine_similarity(x, y, dim=-1),
                          ((3, 1, 5), (4, 5))),
    "distance": (ops.pairwise_distance, F.pairwise_distance, ((3, 5), (3, 5))),
    "distance, p = 3": (lambda x, y: ops.pairwise_distance(x, y, 3.0, keepdim=True),
                        lambda x, y: F.pairwise_distance(x, y, 3.0, keepdim=True), ((3, 5), (5,))),
    "exponential": (ops.matrix_exp, torch.matrix_exp, ((3, 3),)),
    "exponentials": (lambda x: ops.matrix_exp(x * 9), lambda x: torch.matrix_exp(x * 9), ((2, 4, 4),)),
    "small exponential": (lambda x: (x * 1e-3).matrix_exp(), lambda x: (x * 1e-3).matrix_exp(), ((1, 3, 3),))}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_pytorchs(name: str) -> None:
    ours, theirs, shapes = CASES[name]
    values = [rng.standard_normal(shape) for shape in shapes]
    a, b = [Tensor(v, requires_grad=True) for v in values], [torch.tensor(v, requires_grad=True) for v in values]
    made, expected = ours(*a), theirs(*b)
    scale = float(expected.detach().abs().max())
    assert made.shape == tuple(expected.shape)
    np.testing.assert_allclose(made.numpy(), expected.detach().numpy(), rtol=0, atol=1e-13 * scale)
    weights = rng.standard_normal(made.shape)
    made.backward(weights), expected.backward(torch.tensor(weights))
    for x, y in zip(a, b):
        np.testing.assert_allclose(x.grad, y.grad, rtol=0, atol=1e-12 * max(1.0, float(y.grad.abs().max())))   # type: ignore[union-attr]


@pytest.mark.parametrize("call, words", [
    (lambda: ops.cov(np.ones((2, 1))), "too few"),
    (lambda: ops.cov(np.ones((1, 2, 3))), r"expected real numbers of shape \(V, N\)"),
    (lambda: ops.cov(np.ones((2, 3)), fweights=np.ones(2)), "expected 3 numbers"),
    (lambda: ops.cov(np.ones(())), "too few|shape"),
    (lambda: ops.matrix_exp(np.ones((2, 3))), "matrix_exp"), (lambda: ops.pairwise_distance(np.ones(2), np.ones(2), 0), "p is 0"),
    (lambda: ops.cosine_similarity(np.ones((2, 3)), np.ones((2, 4))), "do not broadcast")])
def test_what_does_not_fit_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        call()


def test_exponentials_of_nothing_and_of_what_is_not_finite() -> None:
    assert ops.matrix_exp(np.zeros((0, 0))).shape == (0, 0)
    assert np.array_equal(ops.matrix_exp(np.zeros((2, 2))).numpy(), np.eye(2))
    assert np.isnan(ops.matrix_exp(np.full((2, 2), np.nan)).numpy()).all()
