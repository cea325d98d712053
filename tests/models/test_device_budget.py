"""What a training step asks of a device, counted by the stand-in, may only become less: launches, waits, bytes up and down.

The numbers of `BUDGET` are committed; a change that needs fewer writes them down. Widths are tiny, numbers of layers are real
ones, so launches are those of the real models. (As expressions a step of GPT-2 took 15,190, one of ResNet-20 4,547.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fakegpu
import numpy as np
import pytest
from device_counts import Counts, counted
from fakegpu import put, xp

from mpitrain import nn
from mpitrain.backend import Device, namespace, random
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.start import start
from mpitrain.models import MODELS
from mpitrain.optim import OPTIMIZERS
from mpitrain.optim.norm import numbers_of_a_step
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.statistics import Statistics

GPT2 = {"layers": 12, "heads": 12, "width": 48, "block": 8, "vocabulary": 32, "bias": True, "activation": "gelu_tanh"}
MODELS_OF = {"gpt2": ("gpt", GPT2, "adamw", {"weight_decay": 0.1}),
             "resnet20": ("resnet20", {"channels": 3}, "sgd", {"momentum": 0.9}),
             "mlp": ("mlp", {"inputs": 12, "hidden": [16, 16], "outputs": 10}, "adamw", {})}
# (model, format) -> launches of a micro-batch; of norm, clipping, update and running statistics together.
BUDGET = {("gpt2", "float32"): (351, 4), ("gpt2", "bfloat16"): (352, 4), ("resnet20", "float32"): (169, 5),
          ("resnet20", "bfloat16"): (169, 5), ("mlp", "float32"): (18, 4)}


def batch(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    if name == "gpt2":
        tokens = put(rng.integers(0, 32, (1, 8)))
        return tokens, tokens
    shape = (2, 12) if name == "mlp" else (2, 3, 32, 32)
    return put(rng.standard_normal(shape).astype(np.float32)), put(np.arange(2))


def step_of(name: str, dtype: str) -> tuple[Counts, Counts]:
    """The counts of a micro-batch, and of norm, clipping, update and running statistics, once all is warm."""
    kind, settings, rule, options = MODELS_OF[name]
    model = MODELS[kind](**settings)
    storage = model.initialize(seed=1, dtype=dtype, device=Device("gpu", xp))
    optimizer, norm, numbers = OPTIMIZERS[rule](model, lr=1e-3, **options), GradientNorm(storage.segments), numbers_of_a_step(xp)
    x, y = batch(name)
    x = x.astype(storage.compute_dtype) if x.dtype == np.float32 else x
    gradients = storage.new_flat()
    statistics = Statistics([model], SimpleNamespace(size=1), None)
    for p, view in zip(model.parameters(), storage.views(gradients), strict=True):
        p.grad_buffer = view
    for _ in range(2):
        with random.use(random.Scope(seed=3)), counted() as micro_batch:
            nn.LOSSES["cross_entropy"]()(model(x), y).backward()
        with counted() as update:
            norm.conclude(gradients, numbers, 1.0)
            optimizer.update(gradients, lr=1e-3, step=1, numbers=numbers)
            statistics.apply()
        for p in model.parameters():
            p.grad = None
    return micro_batch, update


@pytest.mark.parametrize(("name", "dtype"), BUDGET)
def test_a_step_makes_no_more_launches_than_it_may_and_waits_for_none(name: str, dtype: str) -> None:
    micro_batch, update = step_of(name, dtype)
    found = micro_batch.n_launches, update.n_launches
    assert found <= BUDGET[name, dtype], (micro_batch.launches, update.launches)
    assert found == BUDGET[name, dtype], f"fewer than before: write {found} into BUDGET"
    assert not micro_batch.syncs and not update.syncs
    assert not micro_batch.up and not micro_batch.down and not update.down and update.up <= 64


def test_the_step_of_gpt2_is_within_what_was_asked_for() -> None:
    for dtype in ("float32", "bfloat16"):
        micro_batch, update = BUDGET["gpt2", dtype]
        assert micro_batch <= 400 and update <= 4


@pytest.mark.parametrize(("graph", "dropout"), [("off", 0.0), ("on", 0.0), ("on", 0.1)])
def test_a_whole_step_brings_up_its_batch_and_down_a_loss_that_is_read_a_step_later(
        graph: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader, forward, backward, clipping, update; the graph of a micro-batch is one launch, with keys of dropout brought up."""
    monkeypatch.setattr(namespace, "_cupy", lambda: (fakegpu.xp, ""))
    load = Workload(lambda: MODELS["gpt"](2, 2, 16, 8, 32, dropout=dropout), 4, (8,), 32, 1, tokens=True)
    training = Training(load, start().comm, sections={"train": {"device": "gpu", "graph": graph},
                                                      "optimizer": {"clip_norm": 1.0}})
    training.run(4)
    with counted() as counts:
        training.launch()
    x, y = training.batches[0]
    assert counts.up <= x.nbytes + y.nbytes + 1024 and counts.down == 7 * 8, "the norm's numbers, and the loss among them"
    assert counts.syncs == {"event": 1} or not counts.syncs, "of this step; the event is that of the step before"
    assert graph == "off" or counts.launches["graph"] == 1 and counts.n_launches <= 12, counts.launches
    training.close()
