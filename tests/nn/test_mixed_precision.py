"""Activations of 16 bits beside float32 values, on the stand-in for a GPU: which format is where, and how training goes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DeviceArray, put, xp

from mpitrain import models, nn, ops, optim
from mpitrain.autograd import Function, Tensor, in_single, recompute
from mpitrain.autograd.mode import mode
from mpitrain.backend import CPU, Device, is_float, random
from mpitrain.backend.dtype import half_dtype
from mpitrain.errors import ConfigError, ShapeError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
GPU = Device("gpu", xp)
HALF = ["bfloat16", "float16"]
STEPS = 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def gpt() -> nn.Module:
    model = models.gpt(layers=2, heads=2, width=32, block=16, vocabulary=50, dropout=0.1, bias=True)
    model.recompute = True
    return model


def resnet() -> nn.Module:
    return models.resnet20(classes=10)


def images(rng: np.random.Generator) -> Any:
    return rng.normal(size=(8, 3, 16, 16)).astype("float32"), rng.integers(0, 10, 8)


def rows(rng: np.random.Generator) -> Any:
    return rng.normal(size=(32, 20)).astype("float32"), rng.integers(0, 10, 32)


def tokens(rng: np.random.Generator) -> Any:
    return (t := rng.integers(0, 50, (4, 16))), np.roll(t, -1, 1)


CASES = {"mlp": (mlp, rows, 1e-2), "gpt": (gpt, tokens, 1e-3), "resnet20": (resnet, images, 1e-3)}


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """(operation, dtype) of each floating-point output."""
    found: list[tuple[str, Any]] = []
    mode.recorder = lambda cls, inputs, params, outputs: found.extend(
        (cls.__name__, t.dtype.name) for t in outputs if is_float(t.dtype))
    try:
        yield found
    finally:
        mode.recorder = None


def trained(name: str, precision: str, steps: int = STEPS) -> tuple[list[float], list[tuple[str, Any]], nn.Module]:
    """Losses of some steps, the outputs of the operations of the first, and the model."""
    make, batch, lr = CASES[name]
    model = make()
    storage = model.initialize(3, precision, GPU)
    optimizer, loss = optim.AdamW(model, lr), nn.LOSSES["cross_entropy"]()
    x, y = batch(np.random.default_rng(0))
    given, losses, first = put(x) if x.dtype.kind == "i" else put(x).astype(storage.compute_dtype), list[float](), list[Any]()
    with recorded() as found:
        for step in range(steps):
            optimizer.zero_grad()
            with random.use(random.Scope(1, step, np.arange(len(x), dtype=np.uint64))):
                total = loss(model(given), put(y))
            first = first if losses else list(found)
            (total * (1 / y.size)).backward()
            optimizer.step()
            losses.append(float(total.array) / y.size)
    return losses, first, model


@cache
def losses_of(name: str) -> list[float]:
    """In float32."""
    return trained(name, "float32")[0]


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet20")) for name in CASES])
def test_training_in_16_bits_has_nearly_the_losses_of_float32_and_each_format_in_its_place(name: str, precision: str) -> None:
    full = losses_of(name)
    losses, outputs, model = trained(name, precision)
    assert losses[-1] < losses[0]
    near = 2e-2 if precision == "bfloat16" else 4e-3
    np.testing.assert_allclose(losses, full, atol=near if name != "resnet20" else 8 * near)     # statistics of few numbers
    assert {(kind, dtype) for kind, dtype in outputs if dtype != precision} == {("CrossEntropy", "float32")}
    for p in model.parameters():
        assert p.master.dtype == p.grad.dtype == "float32"
        assert p.dtype.name == (precision if p.rounded else "float32")
        np.testing.assert_array_equal(p.array.get(), p.master.astype(p.dtype).get())
    for _, buffer in model.named_buffers():
        assert buffer.dtype == "float32"
    masters = {name: asfloat(values) for name, values in model.state_dict().items()}
    assert any((values.view(np.uint32) & 0xFFFF).any() for values in masters.values()), "masters are not rounded"


def asfloat(values: Any) -> np.ndarray[Any, Any]:
    host = values.get() if isinstance(values, DeviceArray) else values
    assert host.dtype == np.float32
    return host


@pytest.mark.parametrize("precision", HALF)
def test_norms_have_gains_in_float32_and_other_layers_copies_in_16_bits(precision: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.RMSNorm(4), nn.Linear(4, 4))
    storage = model.initialize(0, precision, GPU)
    kinds = {name: p.dtype.name for name, p in model.named_parameters()}
    assert kinds == {**dict.fromkeys(("0.weight", "0.bias", "5.weight", "5.bias"), precision),
                     **dict.fromkeys(("1.weight", "1.bias", "2.weight", "2.bias", "4.weight"), "float32")}
    assert storage.values.dtype == "float32" and storage.compute.dtype == half_dtype(precision)
    assert model.initialize(0, precision, CPU).compute is None, "the host has no arrays of 16 bits"


def test_gradients_agree_with_those_of_pytorch_in_bfloat16() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, y = rows(np.random.default_rng(1))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    model.initialize(3, "bfloat16", GPU)
    nn.LOSSES["cross_entropy"]()(model(put(x).astype(half_dtype("bfloat16"))), put(y)).backward()
    peer = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.GELU(),
                               torch.nn.Linear(64, 10))
    with torch.no_grad():
        for p, q in zip(model.parameters(), peer.parameters(), strict=True):
            q.copy_(torch.from_numpy(p.master.get()))
    with torch.autocast("cpu", torch.bfloat16):
        output = peer(torch.from_numpy(x))
    torch.nn.functional.cross_entropy(output.float(), torch.from_numpy(y), reduction="sum").backward()
    for p, q in zip(model.parameters(), peer.parameters(), strict=True):
        wanted = q.grad.numpy()
        assert np.linalg.norm(p.grad.get() - wanted) <= 1e-2 * np.linalg.norm(wanted)


class OnlyWide(Function):
    """An expression that says nothing of 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        assert x.dtype == "float32"
        ctx.save(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, = ctx.saved
        assert grad.dtype == x.dtype == "float32"
        return 2 * x * grad


def halves(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(put(np.random.default_rng(seed).normal(size=shape).astype("float32")).astype("float16"), requires_grad=True)


def test_an_operation_that_says_nothing_gets_float32_and_its_result_is_rounded() -> None:
    x = halves(5, 7)
    y = OnlyWide.apply(x)
    y.backward(put(np.ones((5, 7), "float16")))
    assert y.dtype == "float16" and x.grad.dtype == "float16"
    np.testing.assert_allclose(x.grad.get(), 2 * x.array.get(), rtol=1e-3)


@pytest.mark.parametrize("operation", [
    ops.exp, ops.softmax, ops.log_softmax, ops.leaky_relu, ops.softplus, ops.hardswish, lambda x: ops.clip(x, -1.0, 1.0),
    lambda x: ops.where(x.array > 0, x, 0.0), lambda x: x.reshape(-1)[3:9], lambda x: ops.concatenate([x, x], 1),
    lambda x: -x / 3, lambda x: x ** 3, lambda x: x.mean(1), lambda x: x.sum(0, True), lambda x: ops.max(x, 1),
    lambda x: ops.maximum(x, 0.1), lambda x: x.transpose() @ x, lambda x: ops.einsum("ij,kj->ik", x, x), lambda x: ops.var(x, 0),
    lambda x: ops.sort(x, 1)[0], lambda x: ops.cumsum(x, 1), lambda x: ops.pad(x, [(0, 0), (1, 2)]),
    lambda x: ops.scaled_dot_product_attention(x[None], x[None], x[None], np_mask()), lambda x: recompute(lambda a: a * a, x)])
def test_operations_on_16_bits_have_nearly_their_values_and_gradients_in_float32(operation: Any) -> None:
    x = halves(6, 8)
    wide = Tensor(put(x.array.get().astype("float32")), requires_grad=True)
    made, wanted = operation(x), operation(wide)
    assert made.dtype == "float16" and wanted.dtype == "float32"
    np.testing.assert_allclose(made.array.get().astype("float32"), wanted.array.get(), rtol=4e-3, atol=4e-3)
    factors = np.random.default_rng(1).normal(size=made.shape).astype("float16")
    made.backward(put(factors))
    wanted.backward(put(factors.astype("float32")))
    assert x.grad.dtype == "float16"
    np.testing.assert_allclose(x.grad.get().astype("float32"), wide.grad.get(), rtol=1e-2, atol=1e-2)


def np_mask() -> Any:
    return put(np.tril(np.ones((6, 6), bool)))


def test_sums_of_16_bits_are_made_in_float32() -> None:
    x = Tensor(put(np.full((4096, 2), 1 / 8, "float32")).astype(half_dtype("bfloat16")), requires_grad=True)
    assert float(x.sum().array) == 1024.0 and x.sum().dtype == "float32"       # in bfloat16 it would stand still at 32
    assert x.sum(0).array.astype("float32").get().tolist() == [512.0, 512.0]
    bias = nn.Parameter((2,), nn.init.zeros)
    bias.bind(put(np.zeros(2, "float32")), put(np.zeros(2, "float32")).astype(half_dtype("bfloat16")))
    (x + bias).backward(x.array)
    assert bias.grad.dtype == "float32" and bias.grad.get().tolist() == [512.0, 512.0]


def test_a_computed_tensor_of_float32_makes_the_result_float32_and_constants_do_not() -> None:
    x, computed = halves(3, 3), Tensor(put(np.ones((3, 3), "float32")), requires_grad=True) * 1.0
    assert (x * computed).dtype == "float32" and (x * put(np.ones(3, "float32"))).dtype == "float16"
    assert (x * (computed.sum() * 2)).dtype == "float16", "a number without dims"
    assert (computed @ x).dtype == "float16", "products round their operands"
    (x * computed).sum().backward()
    assert x.grad.dtype == "float16"
    with pytest.raises(ShapeError, match="inputs of float16 and float64"):
        x * Tensor(put(np.ones((3, 3))))
    assert in_single(x).dtype == "float32" and x.astype("float32").dtype == "float32"


def test_the_host_refuses_arrays_of_16_bits_as_before() -> None:
    with pytest.raises(ShapeError, match="an input is float16, expected float32 or float64; convert it first"):
        ops.exp(np.ones(3, "float16"))
    with pytest.raises(ShapeError, match="the values are float16, which tensors do not have"):
        Tensor(np.ones(3, "float16"))
    with pytest.raises(ShapeError, match="which tensors do not have"):
        Tensor(np.ones(3, half_dtype("bfloat16")))


def test_values_written_from_outside_are_rounded_anew() -> None:
    model = models.mlp(6, [5], 3)
    storage = model.initialize(0, "bfloat16", GPU)
    model.load_state_dict({name: np.full(values.shape, math.pi, "float32") for name, values in model.state_dict().items()})
    assert set(storage.values.get()[:30].tolist()) == {float(np.float32(math.pi))}
    assert {float(v) for p in model.parameters() for v in p.array.get().reshape(-1)} == {3.140625}


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    half_dtype.cache_clear()
    with pytest.raises(ConfigError, match=r"needs the package ml_dtypes; install mpitrain\[cuda12\] or \[cuda13\], or set"):
        models.mlp(6, [5], 3).initialize(0, "bfloat16", GPU)
    half_dtype.cache_clear()
