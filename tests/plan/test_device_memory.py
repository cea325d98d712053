"""Memory of a run on a device: predicted by a few rows on it, against what its pool counts in steps. On the stand-in."""

from __future__ import annotations

import gc
from typing import Any

import fakecuda
import fakegpu
import pytest
from fakegpu import put, xp
from fakepool import Blocks

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
RESNET = Workload(lambda: models.MODELS["resnet20"](channels=3), 16, (3, 16, 16), 10, 1)
MLP = Workload(lambda: models.mlp(64, [128, 128], 10), 1200, (64,), 10, 1)


@pytest.fixture(autouse=True)
def on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool that has no gaps which arrays of other tests have left."""
    pool = fakecuda.MemoryPool()
    monkeypatch.setattr(fakecuda, "default_pool", pool)
    monkeypatch.setattr(fakecuda, "_allocators", [pool])
    fakecuda._pools.add(pool)
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


RUNS = [("float32", 1, "auto"), ("bfloat16", 1, "off"), ("float32", 3, "off"), ("bfloat16", 3, "auto")]


@pytest.mark.parametrize(("load", "precision", "micro_batches", "graph"), [
    *((MLP, *run) for run in RUNS), *((GPT, *run) for run in RUNS[::3]),
    *(pytest.param(GPT, *run, marks=pytest.mark.slow) for run in RUNS[1:3]),
    *(pytest.param(RESNET, *run, marks=pytest.mark.slow) for run in RUNS[:2])])
def test_what_is_predicted_is_what_steps_on_the_device_take(
        load: Workload, precision: str, micro_batches: int, graph: str) -> None:
    """Launch by launch, and captured in graphs, of a pool that has gaps where CuPy's has."""
    told, had = predicted_and_measured(load, precision, micro_batches=micro_batches, graph=graph)
    assert (told.parameters, told.gradients, told.optimizer) == (had.parameters, had.gradients, had.optimizer)
    assert told.activations and had.activations and had.pool and told.pool
    assert told.activations == pytest.approx(had.activations, rel=0.02)
    assert told.pool == pytest.approx(had.pool, rel=0.10)


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


def test_graphs_have_the_memory_that_the_step_before_them_had() -> None:
    apart, captured = (predicted_and_measured(MLP, "float32", graph=graph)[1] for graph in ("off", "on"))
    assert apart.pool and captured.pool and captured.pool <= 1.2 * apart.pool, "and a batch to read"


def test_the_pool_of_the_stand_in_has_gaps_as_cupys_has() -> None:
    """Worked out by hand: the best fit is taken, the rest of it stays free, neighbours join, and only what is free as a whole
    goes back to the device."""
    blocks = Blocks()
    one, two, three = (blocks.take(size) for size in (1000, 512, 1))
    assert blocks.taken == 1024 + 512 + 512
    blocks.give_back(one)
    half = blocks.take(300)
    assert half.size == 512 and blocks.taken == 2048, "half of the first"
    blocks.give_back(two)
    other = blocks.take(512)
    assert blocks.taken == 2048
    blocks.take(1024)
    assert blocks.taken == 2048 + 1024, "two free halves of two blocks are no whole one"
    blocks.give_back(half)
    blocks.give_back(other)
    blocks.give_back(three)
    blocks.trim()
    assert blocks.taken == 1024
