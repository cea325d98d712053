"""NaN and infinity go through the compiled kernels as through the expressions that define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.kernels import rows
from mpitrain.kernels.pointwise import ACTIVATIONS
from tests.kernels.test_kernels import arrays_of

STRANGE = [np.nan, np.inf, -np.inf]


def same_where_not_finite(kernel: Any, *arguments: Any) -> None:
    """NaN where the reference has it, infinities of the same sign, numbers that are equal up to rounding."""
    if kernel.host() is None:
        pytest.skip("no compiler")
    with np.errstate(all="ignore"):
        found, wanted = (arrays_of(version(*(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)))
                         for version in (kernel.host(), kernel.reference))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_activation_hands_on_what_is_not_finite(name: str, dtype: str) -> None:
    x = np.linspace(-3, 3, 40).astype(dtype)
    x[:3] = x[20:23] = STRANGE
    activation = ACTIVATIONS[name]
    same_where_not_finite(activation.values, x)
    if activation.and_slope is not None:
        same_where_not_finite(activation.and_slope, x, np.empty_like(x))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("kernel", [rows.softmax, rows.log_softmax], ids=lambda kernel: kernel.name)
def test_a_row_hands_on_what_is_not_finite(kernel: Any, strange: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 5] = x[2, 69] = strange
    same_where_not_finite(kernel, x)
