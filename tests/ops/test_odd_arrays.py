"""Arrays that share memory, are not aligned, or have another byte order; numbers that are none; sources of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, nn, no_grad, ops
from mpitrain.errors import ConfigError, GraphError, MpitrainError, ShapeError

X = np.arange(8, dtype=np.float32).reshape(2, 4)
INDEX = np.array([[0, 3], [2, 1]])
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view_as_real": lambda x, z: ops.view_as_real(z),
    "view_as_complex": lambda x, z: ops.view_as_complex(ops.reshape(x, 2, 2, 2)),
    "real": lambda x, z: ops.real(z), "conj": lambda x, z: ops.conj(z), "flatten": lambda x, z: ops.flatten(x),
    "diagonal": lambda x, z: ops.diagonal(x), "expand": lambda x, z: ops.broadcast_to(x, (2, 2, 4)),
    "unfold": lambda x, z: ops.unfold(x, 1, 2, 1), "triangle": lambda x, z: ops.tril(x, 9),
    "cumsum": lambda x, z: ops.cumsum(x, 0),
    "nan_to_num": lambda x, z: ops.nan_to_num(x), "fft": lambda x, z: ops.fftn(z, dim=())}


@pytest.mark.parametrize("name", VIEWS)
def test_what_shares_memory_shares_the_count_of_changes(name: str) -> None:
    x = Tensor(X, requires_grad=True) * 1
    z = ops.complex(x, x)
    made = VIEWS[name](x, z)
    for source in (x, z):
        if made is not source and np.shares_memory(made.array, source.array):
            assert made.version is source.shared_version()


@pytest.mark.parametrize("name", ["view_as_real", "view_as_complex"])
def test_a_change_through_a_view_of_saved_numbers_is_seen(name: str) -> None:
    x = Tensor(X.reshape(4, 2), requires_grad=True)
    base = x * 1 if name == "view_as_complex" else ops.complex(x, x)
    view, squares = getattr(ops, name)(base), ops.real(base * base).sum()
    with no_grad():
        view.copy_(Tensor(np.zeros(view.shape, view.dtype)))
    with pytest.raises(GraphError):
        squares.backward()


def unaligned(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


OF_MEMORY: dict[str, Callable[[Any, Any], Tensor]] = {
    "cumsum": lambda x, i: ops.cumsum(x, 1), "cumprod": lambda x, i: ops.cumprod(x, 0), "prod": lambda x, i: ops.prod(x, 1),
    "rfft": lambda x, i: ops.rfft(x), "gather": lambda x, i: ops.gather(x, 1, i), "erf": lambda x, i: ops.erf(x),
    "tril": lambda x, i: ops.tril(x), "remainder": lambda x, i: ops.remainder(x, x[::-1]),
    "cummax": lambda x, i: ops.cummax(x, 1)[1],
    "topk": lambda x, i: ops.topk(ops.reshape(x, 8), 1)[1], "kthvalue": lambda x, i: ops.kthvalue(x, 2)[0],
    "scatter": lambda x, i: ops.scatter(x, 1, i, x), "nan_to_num": lambda x, i: ops.nan_to_num(x)}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("name", OF_MEMORY)
def test_arrays_that_are_not_aligned_have_the_same_results(name: str) -> None:
    wanted = OF_MEMORY[name](X, INDEX).array
    assert OF_MEMORY[name](unaligned(X), unaligned(INDEX)).array.tobytes() == wanted.tobytes()
    assert np.array_equal(OF_MEMORY[name](X, INDEX.astype(">i8")).array, wanted, equal_nan=True)
    try:
        swapped = OF_MEMORY[name](X.astype(">f4"), INDEX).array
    except ShapeError:
        return                                                 # NumPy's function answers in the machine's order
    assert np.allclose(swapped, wanted, rtol=1e-6)


WRONG: dict[str, Callable[[], Any]] = {
    "norm": lambda: ops.norm(X, p=None), "vector_norm": lambda: ops.vector_norm(X, "a"), "cdist": lambda: ops.cdist(X, X, None),
    "nan_to_num": lambda: ops.nan_to_num(X, posinf="a"), "gamma": lambda: ops.focal_loss(X, INDEX[0], gamma=None),
    "label_smoothing": lambda: ops.cross_entropy_loss(X, INDEX[0], label_smoothing=None), "RReLU": lambda: nn.RReLU(None),
    "rrelu": lambda: ops.rrelu(X, "a", None), "BatchNorm2d": lambda: nn.BatchNorm2d(3, eps=None),
    "delta below 0": lambda: nn.HuberLoss(delta=-1.0), "LSTM": lambda: nn.LSTM(3.0, 4),
    "several values": lambda: ops.scatter(X, 1, INDEX, value=np.array([1.0, 2.0])),
    "several tensors": lambda: ops.scatter(X, 1, INDEX, value=Tensor(np.ones(2, np.float32), requires_grad=True)),
    "a wider source": lambda: ops.scatter(np.zeros((2, 4), np.uint8), 1, INDEX, INDEX),
    "a wider term": lambda: ops.scatter_add(np.zeros((2, 4), np.uint8), 1, INDEX, INDEX),
    "sorted objects": lambda: ops.sort(np.array([1, None], object)),
    "top of objects": lambda: ops.topk(np.array([1, ""], object), 1)}
WRONG |= {f"{name} of a number": lambda name=name: getattr(ops, name)(3.0, dim=0)
          for name in ("sum", "mean", "max", "min", "var", "logsumexp")}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_number_or_does_not_fit_is_refused_in_one_line(name: str) -> None:
    with pytest.raises((ConfigError, ShapeError)) as caught:
        WRONG[name]()
    assert isinstance(caught.value, MpitrainError) and "\n" not in str(caught.value)


def test_the_gradient_of_a_value_that_is_scattered_is_its_places() -> None:
    index = np.array([[1, 1], [0, 3]])
    for reduce, of_value, of_x in ((None, 3, 5), ("add", 4, 8)):
        x, value = Tensor(X, requires_grad=True), Tensor(np.array(2.0, np.float32), requires_grad=True)
        made = ops.scatter(x, 1, index, value=value, reduce=reduce)
        made.sum().backward()
        assert value.grad == of_value and x.grad.sum() == of_x
        assert np.array_equal(made.array, ops.scatter(X, 1, index, value=2.0, reduce=reduce).array)


def test_integers_of_numpy_are_dims_and_sizes() -> None:
    assert np.array_equal(ops.any(X, dim=np.int64(0)).array, X.any(0)) and np.array_equal(ops.all(X, np.int64(1)).array, X.all(1))
    assert nn.LSTM(np.int64(3), np.int32(4)).hidden == 4


@pytest.mark.parametrize("op", [ops.add, ops.subtract, ops.multiply, ops.divide])
def test_pythons_complex_numbers_are_complex64(op: Any) -> None:
    for x, y in ((1j, 1), (2, 1j), (np.arange(1, 3), 1j), (1j, np.ones(2, np.complex64))):
        assert op(x, y).dtype == "complex64"
    assert op(np.ones(2, np.complex128), 1j).dtype == op(1j, np.complex128(1)).dtype == "complex128"
