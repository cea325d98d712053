"""Integers, booleans and half precision at the door of operations: PyTorch's answer, or one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, ops
from mpitrain.errors import ShapeError

torch = pytest.importorskip("torch")
F = torch.nn.functional

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "softmax", "log_softmax", "celu", "elu",
               "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "relu6", "selu", "softshrink", "threshold", "mish",
               "softmin", "softsign", "glu", "tanhshrink", "prelu", "rrelu", "logsigmoid")
MORE: dict[str, tuple[Any, ...]] = {"softmax": (1,), "log_softmax": (1,), "softmin": (1,), "threshold": (1, 0),
                                    "prelu": (np.ones(1, "f"),)}
WIDER = {("softsign", "bool"), ("tanhshrink", "bool")}       # PyTorch has no |x| and no difference of booleans


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "bool"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_integers_is_pytorchs_or_refused(name: str, dtype: str) -> None:
    values, more = np.array([[1, -2, 3, 0, 9, -8]]).astype(dtype), MORE.get(name, ())
    ours = {"logsigmoid": "log_sigmoid"}.get(name, name)
    try:
        wanted = getattr(F, name)(torch.tensor(values), *(torch.tensor(a) if isinstance(a, np.ndarray) else a for a in more))
    except RuntimeError:
        if (name, dtype) not in WIDER:
            with pytest.raises(ShapeError) as caught:
                getattr(ops, ours)(values, *more, *(["a layer"] if name == "rrelu" else []))
            assert dtype in str(caught.value) or "boolean" in str(caught.value) or "-1.0 is no" in str(caught.value)
        return
    found = getattr(ops, ours)(values, *more).array
    assert found.dtype == wanted.numpy().dtype
    np.testing.assert_allclose(found, wanted.numpy(), rtol=3e-7)


def test_a_bound_that_no_integer_is_is_refused() -> None:
    with pytest.raises(ShapeError, match="hardtanh: the value 1.5 is no int64"):
        ops.hardtanh(np.arange(3), -1, 1.5)
    with pytest.raises(ShapeError, match="threshold: the value 0.5 is no int64"):
        ops.threshold(np.arange(3), 1, 0.5)


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "clongdouble"])
@pytest.mark.parametrize("name", ["exp", "mean", "add", "sqrt", "sum", "reshape", "concatenate", "where", "sin", "matmul",
                                  "relu"])
def test_no_operation_computes_in_other_precisions(name: str, dtype: str) -> None:
    x = np.ones((2, 2), dtype)
    given = {"add": (x, 1), "reshape": (x, (4,)), "concatenate": ([x, x],), "where": (np.ones((2, 2), bool), x, 0.0),
             "matmul": (x, x)}.get(name, (x,))
    with pytest.raises(ShapeError, match=f"an input is {x.dtype}, expected float32 or float64|the values are {x.dtype}, which"):
        getattr(ops, name)(*given)


def test_numpys_scalars_make_no_float16() -> None:
    for call in (lambda: ops.add(1.0, np.float16(1)), lambda: ops.exp(np.uint8(3)),
                 lambda: ops.where(np.ones(2, bool), np.float16(1), 2.0)):
        with pytest.raises(ShapeError, match="the result is float16, expected float32 or float64"):
            call()
    for dtype in ("float16", "longdouble", "clongdouble"):
        with pytest.raises(ShapeError, match="zeros: dtype is"):
            ops.zeros(2, dtype=dtype)


@pytest.mark.parametrize("call", [
    lambda m, a, b: m.einsum(a, [0, 1, 2]), lambda m, a, b: m.einsum(a, [0, 1, 2], [2, 0]),
    lambda m, a, b: m.einsum(a, [0, 1, 2], b, [0, 2, 3]), lambda m, a, b: m.einsum(a, [51, 26, 0], b, [51, 0, 1], [1, 26]),
    lambda m, a, b: m.einsum(a, [..., 0, 1], b, [..., 1, 2], [..., 0, 2]), lambda m, a, b: m.einsum(a, [3, 26, 0])])
def test_einsum_takes_lists_of_numbers(call: Any) -> None:
    a, b = np.arange(24.0).reshape(2, 3, 4), np.arange(40.0).reshape(2, 4, 5)
    np.testing.assert_allclose(call(ops, a, b).array, call(torch, torch.tensor(a), torch.tensor(b)).numpy(), rtol=1e-14)


def test_calls_that_said_nothing_useful() -> None:
    x = np.ones((3, 3))
    for call, message in ((lambda: ops.einsum(x), 'einsum: expected an equation such as "ij->i"'),
                          (lambda: ops.einsum(x, [0, 52]), "einsum: a list has 52, expected numbers 0 ... 51"),
                          (lambda: ops.einsum(x, [0, 1.0]), "einsum: a list has 1.0"),
                          (lambda: ops.full((2,), "a"), "full: the value is 'a', expected a number"),
                          (lambda: ops.full((2,), None), "full: the value is None, expected a number")):
        with pytest.raises(ShapeError, match=message):
            call()
    assert ops.stack([[1.0], [2.0]]).array.tolist() == [[1], [2]]
    assert ops.full((2,), Tensor(np.array(3.0))).array.tolist() == [3, 3]
