"""Seconds of a model's blocks: by formula where nobody measured, by the blocks themselves where the file is this host's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import CPU, random
from mpitrain.config import Config, load_config
from mpitrain.errors import ConfigError
from mpitrain.machines.machine import MachineFile
from mpitrain.machines.measured import fingerprint
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.plan.block_work import count_blocks
from mpitrain.plan.flops import count
from mpitrain.plan.planner.compute import BlockCosts
from mpitrain.plan.planner.timing import one_pass, parts_of, time_blocks
from mpitrain.plan.prepare import open_data
from mpitrain.schedules.level_times import Level
from mpitrain.train.build.inputs import Inputs

PAPER = MachineFile("paper", (Level("node", 0, 1e-6, 1e-10, 0.0),), {"float32": 1e12}, 0.5, 1e11)
TABLES = {"contention": {"ranks": [1, 2], "products": [1.0, 1.0], "memory": [1.0, 2.0], "training": [1.0, 1.25]},
          "by_ranks": {"1": {"step_s": 1e-4, "turns": 1.0}, "2": {"step_s": 3e-4, "turns": 1.0}}, "operation_s": 2e-6}
HERE = replace(PAPER, name="here", measured={**TABLES, "fingerprint": fingerprint()})
ELSEWHERE = replace(PAPER, name="there", measured={**TABLES, "fingerprint": "0" * 16})
DIGITS = (64 * 128, 128 * 64, 64 * 10)                       # multiply-adds of the built-in run's layers
NBYTES = 4 * (sum(DIGITS) + 128 + 64 + 10)                   # of its parameters


def digits(**keys: Mapping[str, Any]) -> tuple[Config, Inputs]:
    config = load_config(None, [f"{section}.{key}={value}" for section, table in keys.items() for key, value in table.items()])
    inputs = open_data(config)
    inputs.transforms.fit(inputs.training, inputs.train_rows)
    return config, inputs


@pytest.fixture(scope="module")
def run() -> tuple[Config, Inputs]:
    return digits()


def of_products(seconds: list[float]) -> list[float]:
    return [one for one in seconds if one]


def test_without_measurements_a_block_takes_its_products_at_the_share_of_the_peak(run: tuple[Config, Inputs]) -> None:
    found = BlockCosts(*run, PAPER).of(32, {"dp": 4})
    assert of_products(found.forward) == pytest.approx([2 * n * 32 / 0.5e12 for n in DIGITS])
    assert found.backward == pytest.approx([2 * seconds for seconds in found.forward]) and found.step == 0.0
    assert sum(found.update) == pytest.approx(7 * NBYTES / 1e11)
    assert "assumed: 50% of the peak of paper" in found.origin and not found.ready
    assert BlockCosts(*run, PAPER).of(32, {"tp": 2}).forward == pytest.approx([seconds / 2 for seconds in found.forward])


def test_rates_that_were_measured_elsewhere_add_calls_contention_and_the_step_itself(run: tuple[Config, Inputs]) -> None:
    alone, two = (BlockCosts(*run, ELSEWHERE).of(32, {"dp": n}) for n in (1, 2))
    assert sum(alone.forward) == pytest.approx(sum(2 * n * 32 / 0.5e12 for n in DIGITS) + 4 * 2e-6)      # 4 blocks of a call each
    assert two.forward == pytest.approx([1.25 * seconds for seconds in alone.forward])
    assert sum(two.update) == pytest.approx(2 * sum(alone.update)) and (alone.step, two.step) == (1e-4, 3e-4)
    assert "rates, in the machine file there" in two.origin


def test_on_this_very_host_the_blocks_are_timed_once_for_each_size(run: tuple[Config, Inputs],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    costs = BlockCosts(*run, HERE)
    found = costs.of(32, {"dp": 1})
    assert found.origin == "measured: the blocks, on this host" and len(found.forward) == len(found.backward) == len(costs.work)
    assert all(seconds > 0 for seconds in found.forward) and sum(found.backward) > 0 and sum(found.update) > 0
    assert found.ready and all(0 < share <= 1 for share in found.ready.values())
    monkeypatch.setattr(BlockCosts, "_time", None)                        # whoever calls it fails
    assert costs.of(32, {"dp": 1}) == found
    assert costs.of(32, {"dp": 2}).forward == pytest.approx([1.25 * seconds for seconds in found.forward])


def test_gradients_of_micro_batches_are_added_up_in_all_backwards_but_one(run: tuple[Config, Inputs]) -> None:
    costs = BlockCosts(*run, PAPER)
    one, four = (sum(costs.of(32, {"dp": 1}, n).backward) for n in (1, 4))
    assert 4 * (four - one) == pytest.approx(3 * 3 * NBYTES / 1e11)


def test_a_precision_without_a_speed_is_refused(run: tuple[Config, Inputs]) -> None:
    config, inputs = digits(train={"precision": '"float64"'})
    with pytest.raises(ConfigError, match=r"the machine paper has no flops of float64, .* it has float32: add \[machine.flops\]"):
        BlockCosts(config, inputs, PAPER)


@pytest.mark.parametrize(("make", "sample"), [
    (lambda: models.mlp(16, [8, 8], 4), np.zeros((1, 16), np.float32)),
    (lambda: models.resnet20(), np.zeros((1, 3, 32, 32), np.float32)),
    (lambda: models.gpt(layers=3, heads=2, width=16, block=8, vocabulary=11), np.zeros((1, 8), np.int64))])
def test_the_work_of_blocks_adds_up_to_the_models(make: Any, sample: Any) -> None:
    model = make()
    found = count_blocks(model, sample)
    assert len(found) == len(model) and sum(work.multiply_adds for work in found) == count(make(), sample).forward
    assert sum(work.operations for work in found) >= len(model) and all(work.elements >= 0 for work in found)
    assert not any(parameter.allocated for parameter in model.parameters())


def test_timed_blocks_compute_the_gradients_of_the_whole_model_and_leave_it_as_it_was() -> None:
    make = lambda: models.gpt(layers=2, heads=2, width=16, block=8, vocabulary=11)                          # noqa: E731
    x, y = (np.random.default_rng(seed).integers(0, 11, (3, 8)) for seed in (1, 2))
    loss, rows = nn.LOSSES["cross_entropy"](), np.arange(3, dtype=np.uint64)
    gradients = []
    for in_parts in (True, False):
        model = make()
        model.initialize(0, "float32").attach_gradients()
        with random.use(random.Scope(0, 0, rows)):
            if in_parts:
                times = one_pass(parts_of(model), Tensor(x), y, loss, iter(range(1000)).__next__, {}, {})
                assert len(times) == 2 * len(model) and all(times)
            else:
                run_backward(loss(model(Tensor(x)), y))
        gradients.append({name: parameter.grad.copy() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)
    model = make()
    timed = time_blocks(model, x, y, loss=loss, optimizer=lambda storage: optim.AdamW(storage, lr=1e-3), seed=0,
                        precision="float32", feed=lambda storage: Feed(CPU, storage.dtype, tokens=True))
    assert len(timed.forward) == len(timed.backward) == len(model) and timed.update > 0
    assert set(timed.ready) == {name for name, _ in model.named_parameters()}
    assert not any(parameter.grad_hooks for parameter in model.parameters())
    assert not any(parameter.allocated for parameter in model.parameters())
