"""A linear layer in one call of C: the bits of its parts one by one, and what it leaves to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import Trained

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.autograd.engine import run_backward
from mpitrain.backend import native
from mpitrain.kernels import linear as module
from mpitrain.kernels import product as products
from mpitrain.kernels.pointwise import ACTIVATIONS

SHAPES = [(70, 150, 130), (8, 400, 410), (1030, 33, 47), (40, 1500, 150),        # (rows, inputs, outputs)
          (512, 8, 256), (256, 512, 8)]                                           # as small as they may be
needs_compiler = pytest.mark.skipif(module.linear.host() is None, reason=f"no compiled version: {native.missing()}")


@pytest.fixture(autouse=True)
def products_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder in (module, products):
        monkeypatch.setattr(holder, "one_thread", lambda: True)
        monkeypatch.setattr(holder, "is_fast", lambda: True)


def run(shape: tuple[int, int, int], dtype: str, name: str | None, biased: bool, split: bool = False) -> list[np.ndarray]:
    """The result of a layer and the gradients of its inputs, those of weight and bias in memory given for them."""
    rows, inputs, outputs = shape
    rng = np.random.default_rng(0)
    x, weight, bias, upstream = (rng.standard_normal(s).astype(dtype) for s in (
        (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)))
    leaves: list[Tensor] = [Tensor(x, requires_grad=True), Trained(weight / 16, requires_grad=True)]
    leaves += [Trained(bias, requires_grad=True)] if biased else []
    for leaf in leaves[1:]:
        leaf.grad_buffer = np.full_like(leaf.array, np.nan)
    y = ops.linear(*leaves, activation=name)
    if split:
        deferred = run_backward(y, upstream, split=True)
        assert leaves[1].grad is None and leaves[0].grad is not None and deferred is not None
        deferred.run()
    else:
        y.backward(upstream)
    assert all(leaf.grad is leaf.grad_buffer for leaf in leaves[1:])
    return [y.array, *(np.asarray(leaf.grad) for leaf in leaves)]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [None, *(name for name in sorted(ACTIVATIONS) if ACTIVATIONS[name].number)])
def test_a_layer_in_one_call_has_the_bits_of_its_parts(name: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    kernel = module.linear_gradients
    monkeypatch.setattr(module, "linear_gradients", lambda *arguments: calls.append(1) or kernel(*arguments))
    for shape in SHAPES:
        for biased in (False, True):
            calls.clear()
            found, halves = (run(shape, dtype, name, biased, split) for split in (False, True))
            assert len(calls) == 3
            with monkeypatch.context() as patch:
                patch.setattr(module, "suits", lambda *arguments: False)
                wanted = run(shape, dtype, name, biased)
            assert len(calls) == 3
            for a, b, c in zip(found, halves, wanted, strict=True):
                assert a.tobytes() == c.tobytes() and b.tobytes() == c.tobytes()


@needs_compiler
@pytest.mark.parametrize("name", [None, "gelu", "relu"])
def test_a_row_of_a_layer_has_the_same_bits_in_any_batch(name: str | None) -> None:
    """Also where the activation follows a whole product, 1500 outputs of 384 terms, instead of its rows."""
    rng = np.random.default_rng(0)
    activation = None if name is None else ACTIVATIONS[name]
    for inputs, outputs in ((200, 130), (384, 1500)):
        x, weight = (rng.standard_normal((n, inputs)).astype(np.float32) for n in (50, outputs))
        whole, _ = module.linear(x, weight, None, activation, True)
        for rows in (8, 13, 49):
            part, _ = module.linear(x[:rows], weight, None, activation, True)
            assert part.tobytes() == whole[:rows].tobytes()


@needs_compiler
def test_gradients_reach_memory_of_another_dtype_or_with_gaps() -> None:
    x, grad = np.ones((64, 150), np.float32), np.ones((64, 130), np.float32)
    weight = np.ones((130, 150), np.float32)
    for by_weight, sums in ((np.zeros((130, 150)), np.zeros(130)),
                            (np.zeros((130, 300), np.float32)[:, ::2], np.zeros(260, np.float32)[::2])):
        module.linear_gradients(grad, None, x, weight, None, sums, by_weight, False)
        assert (by_weight == 64).all() and (sums == 64).all()


def test_without_training_no_derivative_is_kept() -> None:
    x, weight = np.ones((64, 150), np.float32), np.ones((130, 150), np.float32)
    for version in (module.linear.reference, module.linear.host()):
        if version is not None:
            y, kept = version(x, weight, None, ACTIVATIONS["gelu"], False)
            assert kept is y and (y == 150).all()
            y, kept = version(x, weight, None, None, True)
            assert kept is None and (y == 150).all()


X, W = np.zeros((128, 128), np.float32), np.zeros((96, 128), np.float32)


@pytest.mark.parametrize(("x", "weight", "name", "operands"), [
    (X[:6], np.zeros((2000, 128), np.float32), None, ""), (X, W[:6], None, ""), (X[:50], W, None, ""),
    (X.astype(int), W.astype(int), None, ""), (X, W.astype(float), None, ""), (X[:, ::2], W[:, ::2], None, ""),
    (X.astype(">f4"), W.astype(">f4"), None, ""), (X, np.asfortranarray(W), None, ""), (X, W, "tanh", ""),
    (X, W, None, "bfloat16"), (np.ma.zeros((128, 128), np.float32), W, None, "")])
def test_what_one_call_cannot_do_is_left_to_its_parts(x: Any, weight: Any, name: str | None, operands: str) -> None:
    assert module.suits(X, W, ACTIVATIONS["gelu"], "")
    assert not module.suits(x, weight, ACTIVATIONS[name] if name else None, operands)


@needs_compiler
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_without_terms_the_activation_of_the_bias_is_the_output(name: str) -> None:
    x, weight, bias = np.empty((8, 0), np.float32), np.empty((9, 0), np.float32), np.full(9, -1, np.float32)
    found, expected = (f(x, weight, bias, ACTIVATIONS[name], False)[0] for f in (module.linear.host(), module.linear.reference))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
