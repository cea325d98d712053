"""A recorded forward gives the model's own bits, or, with norms folded, its own values; what cannot be recorded runs as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mpitrain import models, nn, ops
from mpitrain.autograd import Tensor, no_grad, record
from mpitrain.infer.prepared import prepared
from mpitrain.infer.recorded import Recorded, rows_alone
from mpitrain.kernels import linear, product
from mpitrain.kernels.few_rows import row_by_row
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.shrink.fold import folded

MODELS: dict[str, Any] = {
    "mlp": ({"inputs": 20, "hidden": [130], "outputs": 3}, (20,)), "lenet": ({}, (1, 28, 28)),
    "resnet20": ({"channels": 2}, (2, 8, 8)),
    "gpt": ({"vocabulary": 11, "block": 6, "width": 16, "heads": 2, "layers": 2}, (6,))}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with threadpool_limits(1):
        product.one_thread.cache_clear()
        yield
    product.one_thread.cache_clear()


def made(name: str) -> nn.Module:
    model: nn.Module = models.MODELS[name](**MODELS[name][0])
    model.initialize(3)
    rng = np.random.default_rng(0)
    for key, leaf in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in key and name == "resnet20":
            near_0 = key.endswith(("bias", "mean"))
            leaf.array[...] = rng.normal(0, 0.3, leaf.shape) if near_0 else rng.uniform(0.3, 1.5, leaf.shape)
    return model.eval()


def rows(name: str, n: int) -> Any:
    rng = np.random.default_rng(n)
    shape = (n, *MODELS[name][1])
    return rng.integers(0, 11, shape) if name == "gpt" else rng.normal(size=shape).astype(np.float32)


def own(model: nn.Module, x: Any) -> Any:
    with no_grad(), rows_alone(x):
        return model(Tensor(x)).array


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 3, 64])
def test_it_gives_what_the_model_gives(name: str, n: int) -> None:
    model = made(name)
    forward = Recorded(model)
    for x in (rows(name, n), rows(name, n)[::-1].copy()):
        wanted = own(model, x)
        if name == "resnet20":
            assert np.abs(forward.of(x) - wanted).max() < 2e-5 * np.abs(wanted).max()
        else:
            assert np.array_equal(forward.of(x), wanted)
    assert [type(found).__name__ for found in forward._lists.values()] == ["Calls"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_gets_other_values_gives_other_outputs(name: str) -> None:
    model, x = made(name), rows(name, 8)
    forward = Recorded(model)
    before = forward.of(x)
    model.load_state_dict({key: 1 + value / 2 if "norm" in key else value / 2 for key, value in model.state_dict().items()})
    assert not np.allclose(forward.of(x), before)
    np.testing.assert_allclose(forward.of(x), own(model, x), rtol=1e-4, atol=1e-5)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Layers of all kinds of products, with sizes below and above those of tiles and blocks."""
    return {"linear": (nn.Linear(401, 130, activation="gelu"), (401,)), "one output": (nn.Linear(3000, 1), (3000,)),
            "of positions": (nn.Linear(64, 5), (3, 64)), "large": (nn.Linear(2100, 2100), (2100,)),
            "wide image": (nn.Conv2d(3, 16, 3, padding=1), (3, 21, 21)), "pixel": (nn.Conv2d(96, 64, 3, padding=1), (96, 1, 1)),
            "1x1": (nn.Conv2d(64, 64, 1), (64, 5, 5)), "depthwise": (nn.Conv2d(24, 24, 3, groups=24), (24, 9, 9)),
            "turned": (nn.ConvTranspose2d(8, 12, 3, stride=2), (8, 5, 5)), "of lines": (nn.Conv1d(8, 12, 3), (8, 19)),
            "attention": (nn.MultiHeadAttention(48, 3), (17, 48)), "cell": (nn.GRUCell(24, 33), (24,)),
            "positions": (nn.LayerNorm(40), (7, 40)), "groups": (nn.GroupNorm(4, 16), (16, 5, 5))}


@pytest.mark.skipif(not product.work_bytes(), reason="no compiler")
@pytest.mark.parametrize("name", [*MODELS, *layers()])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str) -> None:
    if name in MODELS:
        model, x = made(name), rows(name, 64)
    else:
        model, shape = layers()[name]
        model.initialize(1)
        x = np.random.default_rng(2).normal(size=(64, *shape)).astype(np.float32)
    forward = Recorded(model.eval())
    whole = forward.of(x)
    for n in (1, 3, 7, 8, 33):
        for first in (0, 64 - n):
            assert np.array_equal(forward.of(x[first:first + n]), whole[first:first + n]), (n, first)


def test_folded_norms_are_those_of_float64() -> None:
    model = made("resnet20")
    with no_grad(), record() as operations:
        model(Tensor(rows("resnet20", 2)))
    names = [one.name for one in folded(operations, operations[-1].outputs[0])]
    assert names.count("FixedNorm") == 0 and len(names) == len(operations) - 21 + 2    # 19 norms behind convolutions
    double: nn.Module = models.MODELS["resnet20"](**MODELS["resnet20"][0])
    double.initialize(3, "float64")
    for one, other in ((double.named_parameters, model.named_parameters), (double.named_buffers, model.named_buffers)):
        for (_, mine), (_, theirs) in zip(one(), other()):
            mine.array[...] = theirs.array
    x = rows("resnet20", 16)
    wanted = own(double.eval(), x.astype(np.float64))
    folding, plain = (np.abs(found - wanted).max() for found in (Recorded(model).of(x), own(model, x)))
    assert folding < 2 * plain + 1e-6 * np.abs(wanted).max()


class ByValue(nn.Module):
    """Of the user's own: what it does depends on the values."""

    def forward(self, x: Any) -> Any:
        return x * 2.0 if x.array.sum() > 0 else x - 1.0


def test_what_depends_on_values_runs_as_it_is() -> None:
    forward = Recorded(nn.Sequential(("own", ByValue())))
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(forward.of(x), 2 * x) and np.array_equal(forward.of(-x), -x - 1)


class Constant(nn.Module):
    """As if it were ours: a constant that NumPy computes of the input, and no operation of ours."""

    def forward(self, x: Any) -> Any:
        return ops.add(x, x.array.max(axis=0))


def test_a_constant_that_depends_on_the_input_is_noticed() -> None:
    Constant.__module__ = "mpitrain.nn.constant"
    model = nn.Sequential(("constant", Constant()))
    forward = Recorded(model)
    assert forward.may_record
    for seed in (0, 1):
        x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
        assert np.array_equal(forward.of(x), x + x.max(axis=0))


@pytest.mark.parametrize("m, n, k", [(1, 130, 1100), (7, 3, 393), (8, 130, 1100), (64, 48, 784), (65, 513, 384), (13, 4000, 400),
                                     (100, 777, 393)])
@pytest.mark.parametrize("name", ["relu", "gelu", None])
def test_packed_layers_have_the_bits_of_others(m: int, n: int, k: int, name: str | None) -> None:
    rng = np.random.default_rng(m)
    activation = None if name is None else ACTIVATIONS[name]
    for dtype in (np.float32, np.float64):
        x, weight, bias = (rng.normal(size=size).astype(dtype) for size in ((m, k), (n, k), n))
        packed = linear.pack(weight)
        if packed is None:
            pytest.skip("no compiler")
        layer = linear.packed_layer(m, weight.shape, packed, bias, activation)
        assert layer is not None
        weight[...] = weight                                    # the packed copy is its own
        assert np.array_equal(layer(x), _by_rows(x, weight, bias, activation))


def _by_rows(x: Any, weight: Any, bias: Any, activation: Any) -> Any:
    y = row_by_row(x, weight, bias)
    return y if activation is None else activation.forward(y, ours=True, training=False)[0]


def test_operations_without_an_entry_are_left_to_their_forward() -> None:
    with no_grad(), record() as operations:
        ops.add(Tensor(np.ones(3, np.float32)), Tensor(np.ones(3, np.float32)))
    assert prepared(operations[0], {}) is None
