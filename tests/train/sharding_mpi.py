"""States cut over ranks: the losses of the whole run, its bits where sums are made in the same order, and the bytes promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import data, models, nn, optim
from mpitrain.bench.train import Memory
from mpitrain.comm.mesh import Mesh
from mpitrain.parallel.shards import KINDS
from mpitrain.train.assembly import Job, Options, assemble
from mpitrain.train.inputs import Inputs
from mpitrain.train.record import Recorder

CUT = KINDS[1:]
STEPS = 20
Make = Callable[[Any], optim.Optimizer]


class Losses(Recorder):
    """Keeps every step's loss and gradient norm, and every evaluation."""

    def __init__(self, rank: int):
        super().__init__(None, rank=rank, quiet=True)
        self.seen: list[float] = []

    def step(self, done: int, result: Any, seconds: float, *, due: bool) -> None:
        self.seen += [result["loss"], result["grad_norm"] or 0.0]

    def evaluation(self, done: int, metrics: Any, seconds: float) -> None:
        self.seen += metrics.values()


def tokens() -> Inputs:
    windows = np.lib.stride_tricks.sliding_window_view(np.random.default_rng(5).integers(0, 30, 157), 17)
    source = Memory(windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64), "tokens")
    return Inputs(source, range(107), source, range(107, 131), data.Transforms())


def numbers() -> Inputs:
    rng = np.random.default_rng(3)
    source = Memory(rng.standard_normal((131, 96)).astype(np.float32), rng.integers(0, 10, 131))
    return Inputs(source, range(107), source, range(107, 131), data.Transforms(["standardise"]))


def gpt(recompute: bool = False) -> nn.Module:
    model = models.gpt(layers=2, heads=2, width=48, block=16, vocabulary=30, dropout=0.1)
    model.recompute = recompute
    return model


def adam(storage: Any) -> optim.Optimizer:
    return optim.AdamW(storage, lr=3e-3, weight_decay=0.1)


def job_of(mesh: Mesh, kind: str, model: nn.Module, inputs: Inputs, optimizer: Make = adam, **options: Any) -> Job:
    given = {"steps": STEPS, "batch_size": 24, "seed": 7, "eval_every": 10, "log_every": 1, "quiet": True, "bucket_bytes": 30_000,
             "clip_norm": 0.5, **options}
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=optimizer,
                   options=Options(sharding=kind, **given))
    job.trainer.recorder = Losses(mesh.rank)
    return job


def train(comm: Any, kind: str, model: nn.Module, inputs: Inputs, optimizer: Make = adam, pp: int = 1,
          **options: Any) -> tuple[list[float], dict[str, str]]:
    """(losses, norms and metrics, hashes) of a run."""
    mesh = Mesh(comm, pp=pp)
    job = job_of(mesh, kind, model, inputs, optimizer, **options)
    job.fit()
    found = job.trainer.recorder.seen, job.state.hashes()                   # type: ignore[attr-defined]
    job.channel.agree(found[1], "the final parameters")
    mesh.close()
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_every_kind_trains_a_transformer_as_the_whole_run_does(comm: Any, recompute: bool) -> None:
    losses, hashes = train(comm, "none", gpt(recompute), tokens(), micro_batches=comm.size)
    for kind in CUT:
        found, bits = train(comm, kind, gpt(recompute), tokens(), micro_batches=comm.size)
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        assert (bits == hashes) or comm.size > 2, kind           # two addends have one order


@pytest.mark.parametrize("kind", CUT)
def test_more_micro_batches_than_ranks_are_added_up_alike_each_time(comm: Any, kind: str) -> None:
    several = {"micro_batches": 3 * comm.size + (kind != "parameters"), "batch_size": 36}
    losses, _ = train(comm, "none", gpt(), tokens(), **several)
    once, again = (train(comm, kind, gpt(), tokens(), **several) for _ in range(2))
    np.testing.assert_allclose(once[0], losses, rtol=1e-6)
    assert once == again


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "lars"])
def test_optimizers_get_what_they_need(comm: Any, optimizer: str) -> None:
    def make(storage: Any) -> optim.Optimizer:
        return optim.OPTIMIZERS[optimizer](storage, lr=0.01, momentum=0.9) if optimizer == "sgd" else \
            optim.OPTIMIZERS[optimizer](storage, lr=0.01, weight_decay=0.01)

    def mlp() -> nn.Module:
        return models.mlp(96, [112, 80], 10)
    losses, hashes = train(comm, "none", mlp(), numbers(), make)
    for kind in CUT:
        found, bits = train(comm, kind, mlp(), numbers(), make)
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        assert (bits == hashes) or comm.size > 2, kind


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_with_tied_embeddings_are_cut_alike(comm: Any, schedule: str) -> None:
    if comm.size % 2:
        pytest.skip("an odd number of ranks")
    options = {"pp": 2, "micro_batches": 2 * comm.size, "schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    losses, _ = train(comm, "none", gpt(), tokens(), **options)
    for kind in CUT:
        found, _ = train(comm, kind, gpt(), tokens(), **options)
        np.testing.assert_allclose(found, losses, rtol=1e-6)
