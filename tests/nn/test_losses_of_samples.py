"""The relative error of fields and the bound of variational autoencoders, against PyTorch's distributions and NumPy's norms."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError

RNG = np.random.default_rng(0)


def test_the_relative_error_of_a_field_is_that_of_norms() -> None:
    found, wanted = RNG.standard_normal((4, 1, 3, 5)), RNG.standard_normal((4, 1, 3, 5))
    expected = sum(np.linalg.norm(f - w) / np.linalg.norm(w) for f, w in zip(found, wanted))
    loss = nn.LOSSES["relative_l2"]()
    assert float(loss(Tensor(found), wanted)) == pytest.approx(expected, rel=1e-14) and loss.count(wanted) == 4


def test_a_field_that_is_met_has_no_error_and_a_finite_gradient() -> None:
    x = Tensor(RNG.standard_normal((2, 3)), requires_grad=True)
    loss = nn.LOSSES["relative_l2"]()(x, x.array.copy())
    loss.backward()
    assert float(loss) == 0.0 and np.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_the_bound_is_that_of_pytorch_s_distributions(kind: str) -> None:
    torch = pytest.importorskip("torch")
    d = torch.distributions
    output, target = RNG.standard_normal((5, 6 + 8)), RNG.uniform(0, 1, (5, 2, 3))
    made, mean, log_variance = map(torch.tensor, np.split(output, [6, 10], axis=1))
    wanted = torch.tensor(target.reshape(5, 6))
    likelihood = d.ContinuousBernoulli(logits=made) if kind == "binary" else d.Normal(made, 1.0)
    first = -likelihood.log_prob(wanted).sum()
    first += likelihood._cont_bern_log_norm().sum() if kind == "binary" else -0.5 * np.log(2 * np.pi) * made.numel()
    divergence = d.kl_divergence(d.Normal(mean, (0.5 * log_variance).exp()), d.Normal(0.0, 1.0)).sum()
    loss = nn.LOSSES["elbo"](reconstruction=kind, beta=2.5)
    assert float(loss(Tensor(output), target)) == pytest.approx((first + 2.5 * divergence).item(), rel=1e-10)


@pytest.mark.parametrize("shape", [(2, 6), (2, 9), (2, 3), (2, 2, 7)])
def test_an_output_that_has_no_code_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"the elbo loss expects an output \(N, 6 \+ 2 Z\) for targets \(2, 2, 3\), found"):
        nn.LOSSES["elbo"]()(Tensor(np.zeros(shape)), np.zeros((2, 2, 3)))
