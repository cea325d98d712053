"""Where an operation is at an edge of its definition, or of a dtype, against PyTorch or a law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import autograd, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError


def leaf(values: Any, dtype: str = "float64") -> Tensor:
    return Tensor(np.array(values, dtype), requires_grad=True)


def gradient(f: Any, *inputs: Tensor) -> list[np.ndarray]:
    return [g.array for g in autograd.grad(f(*inputs).sum(), inputs)]


def test_probabilities_of_0_and_1_have_the_slope_of_the_other_logarithm() -> None:
    found, = gradient(lambda p: ops.binary_cross_entropy(p, np.float32([0, 1, 1]), reduction="sum"), leaf([0, 1, 0.5], "float32"))
    assert found.tolist() == [1, -1, -2]              # not 0 times the infinite slope of log at 0


def test_vectors_of_eigh_have_a_directional_derivative() -> None:
    a, v = np.array([[2, 0.5], [0.5, 1]]), np.array([[0.3, 0.2], [0.2, -0.4]])
    found = autograd.jvp(lambda x: ops.eigh(x)[1], Tensor(a), Tensor(v))[1].array
    h = 1e-6
    wanted = (np.linalg.eigh(a + h * v)[1] - np.linalg.eigh(a - h * v)[1]) / (2 * h)
    assert np.allclose(found, wanted, atol=1e-8)


@pytest.mark.parametrize("side", "LU")
def test_the_second_derivative_of_eigenvalues_along_symmetric_directions(side: str) -> None:
    rng = np.random.default_rng(0)
    a, s, weight = (m + m.T for m in rng.standard_normal((3, 4, 4)))
    c = rng.standard_normal(4)

    def slope(b: Any) -> Any:
        v = np.linalg.eigh(b, side)[1]
        return v @ np.diag(c) @ v.T
    x = leaf(a)
    first, = autograd.grad((ops.eigvalsh(x, side) * c).sum(), (x,), create_graph=True)
    found, = autograd.grad((first * weight).sum(), (x,))
    wanted = ((slope(a + 1e-6 * s) - slope(a - 1e-6 * s)) * weight).sum() / 2e-6
    assert np.allclose((found.array * s).sum(), wanted, rtol=1e-7)


def test_places_beyond_the_range_of_a_small_index_type() -> None:
    index = np.full((1, 300), 3, np.uint8)
    found, = gradient(lambda x: ops.gather(x, 0, index), leaf(np.ones((4, 300))))
    assert (found[3] == 1).all() and found.sum() == 300


def test_the_second_derivative_of_a_norm_at_a_component_of_0() -> None:
    found = autograd.hessian(ops.vector_norm, Tensor(np.array([3.0, 0.0, 4.0])))
    assert np.allclose(np.diag(found.array), [0.128, 0.2, 0.072], atol=1e-15)


def test_rows_of_complex_numbers_have_gradients() -> None:
    z = leaf([1 + 2j, 3 - 1j], "complex128")
    found, = gradient(lambda z: ops.real(ops.index_select(z, 0, np.array([1, 1]))), z)
    assert found.tolist() == [0, 2]


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_hypot_does_not_overflow_in_its_gradient(size: float) -> None:
    for found in gradient(ops.hypot, leaf([size], "float32"), leaf([size], "float32")):
        assert np.allclose(found, 0.5 ** 0.5)


def test_adjoint_conjugates_and_powers_of_complex_numbers_have_both_gradients() -> None:
    z = np.array([[1 + 2j, 3 - 1j]])
    assert (ops.adjoint(z).array == z.conj().T).all() and (Tensor(z).mT.array == z.T).all()
    torch = pytest.importorskip("torch")
    ours = gradient(lambda a, b: ops.real(a ** b), leaf([1 + 2j], "complex128"), leaf([0.5 - 1j], "complex128"))
    theirs = [torch.tensor(x, dtype=torch.complex128, requires_grad=True) for x in ([1 + 2j], [0.5 - 1j])]
    (theirs[0] ** theirs[1]).real.sum().backward()
    for a, b in zip(ours, theirs):
        assert np.allclose(a, b.grad.numpy(), rtol=1e-12)
    with pytest.raises(ShapeError, match="no order"):
        ops.less(z, z)


@pytest.mark.parametrize("call", [
    lambda: ops.clip(np.arange(3), 0.5, 2.5), lambda: ops.mean(np.arange(3)),
    lambda: ops.var(np.arange(3)), lambda: ops.nanmean(np.arange(3))])
def test_integers_beside_fractions_become_float32(call: Any) -> None:
    assert call().dtype == "float32"


@pytest.mark.parametrize("call", [
    lambda: ops.interpolate(np.ones((1, 1, 4, 4), np.uint8), size=(2, 2), mode="bilinear"),
    lambda: ops.index_copy(np.zeros(3, np.int64), 0, np.array([1]), np.float32([1.5])),
    lambda: ops.vander(np.array(2.0)), lambda: ops.unfold(np.array(2.0), 0, 2, 1)])
def test_what_does_not_fit_is_refused_in_a_line(call: Any) -> None:
    with pytest.raises(ShapeError):
        call()


def test_a_position_that_is_no_number_takes_the_first_pixel() -> None:
    x = np.arange(4.0).reshape(1, 1, 2, 2) + 1
    grid = np.full((1, 1, 1, 2), np.nan)
    assert ops.grid_sample(x, grid, padding_mode="border").array.item() == 1
