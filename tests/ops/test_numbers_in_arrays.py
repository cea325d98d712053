"""Numbers beside arrays, other dtypes, and places that are none: PyTorch's result, or a refusal in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError

MASK = np.array([True, False])
SOURCES: dict[str, tuple[Any, Any]] = {
    "numbers": (1.0, 0.0), "integers": (1, 0), "an integer and a number": (1, 0.5), "truths": (True, False), "i": (1j, 0),
    "integers and a number": (np.array([1, 2]), 0.5), "truths and an integer": (MASK, 2),
    "float64 and a number": (np.array([1.0, 2.0]), 0.5), "float32 and an integer": (np.array([1, 2], np.float32), 3),
    "int8 and an integer": (np.array([1, 2], np.int8), 100), "float32 and i": (np.array([1, 2], np.float32), 1j)}


@pytest.mark.parametrize("name", SOURCES)
def test_where_has_pytorchs_dtype(name: str) -> None:
    torch = pytest.importorskip("torch")
    given = SOURCES[name]
    wanted = torch.where(torch.tensor(MASK), *(torch.tensor(a) if isinstance(a, np.ndarray) else a for a in given)).numpy()
    found = ops.where(MASK, *given).array
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


FILLS: dict[str, tuple[Any, Any]] = {
    "an integer": (np.arange(2), 7), "True": (np.arange(2), True), "a number that is an integer": (np.arange(2), 2.0),
    "a float64 tensor": (np.ones(2, np.float32), np.array(0.1)), "an integer tensor": (np.ones(2, np.float32), np.array(3)),
    "inf": (np.ones(2, np.float32), float("inf")), "NaN": (np.ones(2), float("nan")), "bool": (MASK, True)}


@pytest.mark.parametrize("name", FILLS)
def test_masked_fill_keeps_the_dtype_as_pytorchs_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    x, value = FILLS[name]
    wanted = torch.tensor(x).masked_fill(torch.tensor(MASK), torch.tensor(value) if isinstance(value, np.ndarray) else value)
    found = ops.masked_fill(x, MASK, value).array
    assert found.dtype == wanted.numpy().dtype and np.array_equal(found, wanted.numpy(), equal_nan=True)


@pytest.mark.parametrize("call", [
    lambda: ops.masked_fill(np.arange(2), MASK, 0.5), lambda: ops.masked_fill(np.arange(2), MASK, Tensor(0.5)),
    lambda: ops.masked_fill(MASK, MASK, 2), lambda: ops.masked_fill(np.arange(2), MASK, float("nan")),
    lambda: ops.masked_fill(np.ones(2), MASK, 1j), lambda: ops.masked_fill(np.ones(2, np.float32), MASK, 1e300),
    lambda: ops.masked_fill(np.arange(2), MASK, Tensor(np.array(1j))),
    lambda: ops.index_fill(np.arange(2), 0, np.array([0]), 0.5), lambda: ops.scatter(np.arange(2), 0, np.array([0]), 2.5),
    lambda: ops.scatter(np.arange(2), 0, np.array([0]), 2.5, reduce="add"),
    lambda: ops.where(MASK, np.array([1, 2], np.int8), 300), lambda: ops.where(MASK, 300, np.array([1, 2], np.int8)),
    lambda: ops.index_put(np.ones((2, 2)), (None, np.array([0])), np.ones(2)),
    lambda: ops.index_put(np.ones((2, 2)), (np.array([0]), None), np.ones(2)),
    lambda: ops.astype(np.array([1j]), "float32"), lambda: ops.astype(np.array([1j]), "int64"),
    lambda: ops.tensor(np.array([1j]), dtype="float32"), lambda: ops.tensor([1j], dtype="int64"),
    lambda: ops.tensor([[1], [1, 2]]),
    lambda: ops.tensor("a"), lambda: Tensor([1j]), lambda: Tensor("a"), lambda: Tensor([[1], [1, 2]])])
def test_what_would_lose_a_part_is_refused_in_one_line(call: Any) -> None:
    with pytest.raises(ShapeError) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("to", ["complex64", "complex128"])
@pytest.mark.parametrize("kind", ["float32", "float64", "complex64", "complex128", "int64"])
def test_a_cast_to_complex_numbers_has_pytorchs_gradient(kind: str, to: str) -> None:
    torch = pytest.importorskip("torch")
    values = np.array([1, -2, 0.5] if kind != "int64" else [1, -2, 3]).astype(kind) * (1 + 2j if kind[0] == "c" else 1)
    values, weight, moving = values.astype(kind), np.array([1 + 2j, 3 - 1j, -1j]).astype(to), kind != "int64"
    x, t = Tensor(values, moving), torch.tensor(values, requires_grad=moving)
    y, theirs = ops.astype(x, to), t.to(getattr(torch, to))
    assert y.array.dtype == to and np.array_equal(y.array, theirs.detach().numpy())
    if moving:
        ops.sum(ops.real(y * weight)).backward()
        (theirs * torch.tensor(weight)).real.sum().backward()
        assert x.grad is not None and x.grad.dtype == kind and np.array_equal(x.grad, t.grad.numpy())


def test_lists_of_complex_numbers_are_complex64() -> None:
    made = ops.tensor([1 + 2j, 3])
    assert made.dtype == "complex64" and made.array.tolist() == [1 + 2j, 3]
    assert ops.astype(made, "bool").array.tolist() == [True, True]


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "var", "std", "nansum", "nanmean", "all", "any",
                                  "count_nonzero"])
@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_an_empty_dim_means_what_it_means_in_pytorch(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    values = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    if name in ("var", "std") and not shape:
        values = np.ones((1, 2))
    wanted, found = getattr(torch, name)(torch.tensor(values), dim=()).numpy(), getattr(ops, name)(values, dim=()).array
    assert found.shape == wanted.shape and np.allclose(found, wanted)


def test_a_number_has_one_dim_for_a_sum() -> None:
    for op in (ops.sum, ops.mean, ops.max, ops.logsumexp):
        assert op(Tensor(np.array(2.0)), dim=0).array == 2 and op(Tensor(np.array(2.0)), dim=[-1], keepdim=True).shape == ()
        with pytest.raises(ShapeError, match="dim 1 of an array with 0 dims"):
            op(Tensor(np.array(2.0)), dim=1)
    assert ops.sum(np.ones((2, 3)), dim=[0, 1]).array == 6


def test_the_sign_of_nan_is_0_as_in_pytorch() -> None:
    x = np.array([np.nan, -0.0, 0.0, 3, -np.inf])
    assert ops.sign(x).array.tolist() == ops.sgn(x).array.tolist() == [0, 0, 0, 1, -1]
    assert ops.sign(np.array([3, 0], np.uint8)).array.tolist() == [1, 0]


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("far", [np.nan, np.inf, -np.inf, 1e30])
def test_places_that_are_none_are_sampled_as_pytorch_samples_them(mode: str, padding: str, far: float) -> None:
    torch = pytest.importorskip("torch")
    image, grid = np.arange(1.0, 10).reshape(1, 1, 3, 3), np.array([[[[far, 0.1], [0.1, far]]]])
    with np.errstate(invalid="ignore"):
        x, places = Tensor(image, True), Tensor(grid, True)
        y = ops.grid_sample(x, places, mode=mode, padding_mode=padding)
        y.sum().backward()
    if mode == "bilinear" and padding != "zeros" and not np.isfinite(far):      # PyTorch 2.13 dies of some of these
        first = ops.grid_sample(image, np.where(np.isfinite(grid), grid, -1 if padding == "reflection" or far != np.inf else 1),
                                mode=mode, padding_mode=padding)
        assert np.allclose(y.array, first.array) and np.isfinite(places.grad).all() and np.isfinite(x.grad).all()
        return
    theirs = [torch.tensor(a, requires_grad=True) for a in (image, grid)]
    wanted = torch.nn.functional.grid_sample(*theirs, mode=mode, padding_mode=padding, align_corners=False)
    wanted.sum().backward()
    for a, b in ((y.array, wanted), (x.grad, theirs[0].grad), (np.zeros(grid.shape) if places.grad is None else places.grad,
                                                              theirs[1].grad)):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-12, equal_nan=True)


def test_polygamma_is_reflected_below_a_half() -> None:
    """By the recurrence psi_n(x + 1) = psi_n(x) + (-1)^n n! / x^(n + 1), and by 17 digits of Python's mpmath."""
    x = np.array([-1001.2, -3.7, -0.4, 0.3, 0.49])
    for n in range(1, 6):
        step = (-1.0) ** n * float(np.prod(np.arange(1, n + 1))) / x ** (n + 1)
        assert np.allclose(ops.polygamma(n, x + 1).array, ops.polygamma(n, x).array + step, rtol=1e-8)
    assert np.isclose(ops.polygamma(4, np.array([-1001.2])).array[0], 74935.513631647975, rtol=1e-12)


def test_two_numbers_are_added_in_float32_as_in_pytorch() -> None:
    assert ops.add(1.5, 2.5).dtype == ops.divide(1, 2).dtype == "float32" and ops.multiply(2, 3).dtype == "int64"


@pytest.mark.parametrize("call", [
    lambda: ops.linspace(0, 1, 2.0), lambda: ops.linspace(np.ones(2), 1, 3), lambda: ops.logspace(0, 1, 2.0),
    lambda: ops.hsplit(np.ones((2, 2)), "abc"), lambda: ops.roll(np.array(1.0), 0, 0), lambda: ops.fftn(np.array(1.0), dim=[0]),
    lambda: ops.narrow(np.ones((4, 4)), 0, np.array(False), 1), lambda: ops.narrow(np.ones((4, 4)), 0, np.array([0]), 1)])
def test_what_pytorch_refuses_is_refused_in_one_line(call: Any) -> None:
    with pytest.raises(ShapeError) as caught:
        call()
    assert "\n" not in str(caught.value)
