"""Models learn as with the plain expressions: 50 losses with every compiled kernel, beside 50 with none.

Residual nets in float32 stay together for some steps only: ReLUs near zero flip, and a net of plain expressions is 2e-3 away
from itself after 50 steps where its initial values are moved by 1e-7. So theirs are 50 steps of float64, the same C code.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpitrain.kernels
from mpitrain import models, nn, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import native, random
from mpitrain.kernels import KERNELS, Kernel, linear, product
from mpitrain.models.residual import _cifar_resnet

for module in pkgutil.iter_modules(mpitrain.kernels.__path__):
    importlib.import_module(f"mpitrain.kernels.{module.name}")

@dataclass
class Case:
    """A model, small but large enough for its fast paths, and kernels that must have been on them."""

    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int
    lr: float
    used: set[str]
    tokens: bool = False
    rule: str = "adamw"
    precision: str = "float32"
    steps: int = 50


GPT = {"linear", "linear_gradients", "row_norm", "row_norm_gradients", "cross_entropy", "cross_entropy_grad",
       "scatter_add_rows", "adam"}


def resnet8() -> nn.Module:
    return _cifar_resnet(1, 10, 3, "batch", None)


CONV = {"convolve", "convolve_adjoint", "kernel_gradient"}
RESNET = CONV | {"batch_norm", "batch_norm_gradients", "sgd"}
CASES = {
    "mlp": Case(lambda: models.mlp(128, [256, 256], 10), 64, (128,), 10, 1e-3,
                {"linear", "linear_gradients", "cross_entropy", "cross_entropy_grad", "adam"}),
    "lenet": Case(models.lenet, 16, (1, 28, 28), 10, 1e-3, CONV | {"window_maximum", "window_maximum_gradient", "adam"}),
    "resnet8": Case(resnet8, 16, (3, 8, 8), 10, 0.01, RESNET, rule="sgd", precision="float64"),
    "resnet20": Case(models.resnet20, 8, (3, 16, 16), 10, 0.01, RESNET, rule="sgd", precision="float64"),
    "resnet8, float32": Case(resnet8, 16, (3, 16, 16), 10, 0.01, RESNET, rule="sgd", steps=5),
    "gpt": Case(lambda: models.gpt(2, 4, 64, 32, 65), 4, (32,), 65, 1e-3,
                GPT | {"flash_attention", "flash_attention_grad"}, True, steps=15),
    "gpt with dropout": Case(lambda: models.gpt(2, 4, 64, 32, 65, dropout=0.2), 4, (32,), 65, 1e-3,
                             GPT | {"flash_attention", "flash_attention_grad"}, True),
}


SLOW = {"lenet", "resnet8", "resnet20", "gpt", "gpt with dropout"}


def losses(case: Case) -> list[float]:
    model = case.make()
    storage = model.initialize(0, case.precision)
    storage.attach_gradients()
    optimizer, loss_of = optim.OPTIMIZERS.resolve(case.rule)(storage, lr=case.lr), nn.LOSSES["cross_entropy"]()
    rng, samples = np.random.default_rng(0), 2 * case.batch
    shape, each = (samples, *case.shape), (samples, *case.shape) if case.tokens else (samples,)
    x = rng.integers(0, case.classes, shape) if case.tokens else rng.standard_normal(shape).astype(case.precision)
    y, found = rng.integers(0, case.classes, each), []
    for step in range(case.steps):
        rows = np.arange(step % 2, samples, 2)
        optimizer.zero_grad()
        with random.use(random.Scope(0, step, rows.astype(np.uint64))):
            loss = loss_of(model(Tensor(x[rows])), y[rows])
        found.append(float(loss.array) / y[rows].size)
        run_backward(loss, np.asarray(1 / y[rows].size, case.precision))
        optimizer.step()
    return found


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_losses_are_those_of_the_plain_expressions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, used, call = CASES[name], set(), Kernel.__call__

    def noting(self: Kernel, *arguments: Any) -> Any:
        used.add(self.name)
        return call(self, *arguments)
    for holder in (product, linear):
        monkeypatch.setattr(holder, "one_thread", lambda: True)
    with monkeypatch.context() as during:
        during.setattr(Kernel, "__call__", noting)
        fast = losses(case)
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "host", lambda: None)
    plain = losses(case)
    assert case.used - (set() if product.is_fast() else {"linear", "linear_gradients"}) <= used    # NumPy's where it is faster
    np.testing.assert_allclose(fast, plain, rtol=1e-5)
    assert fast[-1] < (0.8 if case.steps == 50 else 1.0) * fast[0]
