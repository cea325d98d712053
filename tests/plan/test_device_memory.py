"""Memory of a run on a device: predicted by a few rows on it, against what its pool counts in steps. On the stand-in."""

from __future__ import annotations

import gc
from typing import Any

import fakegpu
import pytest
from fakegpu import put, xp

from mpitrain import models, nn
from mpitrain.backend import Device, namespace
from mpitrain.backend.device_memory import DevicePool
from mpitrain.bench.train import Training, adam
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.start import start
from mpitrain.parallel.pipeline.uploads import Uploads
from mpitrain.placement.bytes import Use
from mpitrain.placement.place import place
from mpitrain.plan.memory import forecast
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.validate import find_schedule
from mpitrain.train.observers.memory import Memory

GPT = Workload(lambda: models.gpt(1, 2, 32, 32, 64), 12, (32,), 64, 1, tokens=True)
MLP = Workload(lambda: models.mlp(64, [128, 128], 10), 1200, (64,), 10, 1)


@pytest.fixture(autouse=True)
def on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_cupy", lambda: (fakegpu.xp, ""))


def predicted_and_measured(load: Workload, precision: str, **train: Any) -> tuple[Use, Use]:
    gc.collect()
    xp.get_default_memory_pool().free_all_blocks()
    sections = {"train": {"device": "gpu", "graph": "off", "precision": precision, **train}}
    training = Training(load, start().comm, sections=sections)
    config, memory = training.config, Memory(training.job)
    found = forecast(place(load.make(), Grid({}), config.mesh, config.train, config.comm), training.sample, tokens=load.tokens,
                     loss=nn.LOSSES["cross_entropy"](), optimizer=adam, schedule=find_schedule(config))
    assert not found.why, found.why
    trainer = training.job.trainer
    for step, batch in Uploads(trainer.pipeline.feed).ahead((step, training._micro_batches[step % 2]) for step in range(3)):
        memory.before_step(step)
        float(trainer.train_step(batch).mean)
        memory.after_step(step, None, 0.0)         # type: ignore[arg-type]
    training.close()
    return found.stages[0], memory.measured()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", [GPT, MLP], ids=["gpt", "mlp"])
def test_what_is_predicted_is_what_steps_on_the_device_take(load: Workload, precision: str, micro_batches: int) -> None:
    told, had = predicted_and_measured(load, precision, micro_batches=micro_batches)
    assert (told.parameters, told.gradients, told.optimizer) == (had.parameters, had.gradients, had.optimizer)
    assert told.activations and had.activations and had.pool and told.pool
    assert told.activations == pytest.approx(had.activations, rel=0.02)
    assert told.pool == pytest.approx(had.pool, rel=0.15), "with free blocks between others, which the stand-in has none of"


def test_the_peak_is_that_of_arrays_that_were_there_together() -> None:
    """Of 512 bytes each; a view takes nothing, and what nobody has is given back."""
    pool = DevicePool(Device("gpu", xp))
    kept = put([0.0])
    before = pool.usage().used
    with pool:
        pool.recent_peak()
        first, second = xp.zeros(64), xp.zeros(65)
        view = first[:3]
        assert pool.usage().used == before + 512 + 1024
        del first
        assert pool.usage().used == before + 512 + 1024, "the view has the memory"
        del view, second
        third = kept + 1.0
        assert pool.usage().used == before + 512 and pool.recent_peak() == before + 512 + 1024
        assert pool.recent_peak() == before + 512
    del third
    assert pool.usage().used == before
