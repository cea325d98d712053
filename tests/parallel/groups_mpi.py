"""Groups of parameters on meshes that cut the model, frozen buckets, and rates that depend on the run, on real ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import pytest
from mpi4py import MPI

from mpitrain import Run, load_config, models, nn, optim
from mpitrain.comm.work import Collective, Work
from mpitrain.errors import Stopped
from mpitrain.optim.groups import Group, apply
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.train.trainer import Trainer

SHAPE = ("model.name=mlp", "model.inputs=64", "model.hidden=[24,24]", "model.outputs=10", "data.path=digits",
         "data.validation=0.05", "train.batch_size=24", "train.micro_batches=4", "train.precision=float64",
         "optimizer.schedule=constant", "log.every=1", "log.progress_s=0", "checkpoint.every=2", "optimizer.lr=0.01")
GROUPS = ('optimizer.groups=[{params="head.*",lr_factor=0.1},{params="linear0.weight",freeze_until=2},'
          '{params="*1.bias",weight_decay=0.5,betas=[0.8,0.9]},{params="linear0.bias",frozen=true}]')


def trained(ranks: Any, out: Path, *settings: str, resume: str | None = None) -> tuple[list[float], list[float], str]:
    """Losses and rates of all steps, and the hash of the parameters; of the first of `ranks`."""
    run = Run(load_config(None, [*SHAPE, f"run.out={out}", *settings]), ranks, quiet=True)
    try:
        hashes = run.train(resume=resume, overwrite=resume is None).hashes
    finally:
        run.close()
    if ranks.rank:
        return [], [], ""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in found if "split" not in line]
    return [line["loss"] for line in steps], [line["lr"] for line in steps], hashes["parameters_sha256"]


def only_of_two(comm: Any) -> None:
    if comm.size != 2:
        pytest.skip("runs of two ranks, of a second each")


@pytest.mark.parametrize("cut", ["pp", "tp"])
def test_groups_are_those_of_one_rank_where_ranks_have_parts_of_the_model(comm: Any, mpi_tmp_path: Path, cut: str) -> None:
    """Rates, decay and keys of their own, frozen, and thawed at step 2, also after resuming there."""
    only_of_two(comm)
    found, _, whole = trained(comm, mpi_tmp_path / "cut", GROUPS, f"mesh.{cut}=2", "train.steps=4")
    trained(comm, mpi_tmp_path / "again", GROUPS, f"mesh.{cut}=2", "train.steps=2")
    again, _, resumed = trained(comm, mpi_tmp_path / "again", GROUPS, f"mesh.{cut}=2", "train.steps=4", resume="auto")
    assert whole == resumed and again == found
    if comm.rank == 0:
        expected, _, _ = trained(MPI.COMM_SELF, mpi_tmp_path / "one", GROUPS, "train.steps=4")
        plain, _, _ = trained(MPI.COMM_SELF, mpi_tmp_path / "plain", "train.steps=4")
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        assert abs(plain[-1] / expected[-1] - 1) > 1e-4
    comm.barrier()


@pytest.mark.parametrize("rate", [
    ("optimizer.schedule=plateau", "optimizer.patience=0", "optimizer.threshold=0.9", "optimizer.factor=0.5",
     "train.eval_every=1"),
    ('optimizer.schedules=[{name="linear"},{name="cosine"},{name="warm_restarts",t_0=2}]', "optimizer.schedule=sequential",
     "optimizer.milestones=[1,4]")], ids=["plateau", "sequential"])
def test_a_rate_goes_on_where_the_run_stopped(comm: Any, mpi_tmp_path: Path, rate: tuple[str, ...],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, losses and bits of a run that never stopped; the stop falls inside the second schedule, and between two falls."""
    only_of_two(comm)
    settings = ("optimizer.warmup_steps=0", *rate, "train.steps=6")
    expected = trained(comm, mpi_tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "flags", property(lambda trainer: (trainer.update.step == 1, False)))
        with pytest.raises(Stopped):
            trained(comm, mpi_tmp_path / "parts", *settings)
    assert trained(comm, mpi_tmp_path / "parts", *settings, resume="auto") == expected
    assert comm.rank or len(set(expected[1])) > 3


def test_frozen_parameters_send_no_bytes(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What buckets that were started have is what is trained, to the byte."""
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    sent: list[int] = []
    prepare = AllReduce.prepare

    class Counted:
        def __init__(self, inner: Collective, size: int):
            self.inner, self.size = inner, size

        def start(self) -> Work:
            sent.append(self.size)
            return self.inner.start()

    def counting(self: Any, bucket: Any, arrays: Any) -> Any:
        return Counted(prepare(self, bucket, arrays), arrays[0].nbytes)

    monkeypatch.setattr(AllReduce, "prepare", counting)
    for frozen, size in (((), 20 * 48 + 48 + 48 * 24 + 24 + 24 * 10 + 10), (("linear0.*", "linear1.weight"), 24 + 24 * 10 + 10)):
        def make(frozen: tuple[str, ...] = frozen) -> nn.Sequential:
            model = models.mlp(20, [48, 24], 10)
            if frozen:
                apply([Group(frozen, start=np.inf)], [(name, p) for name, p in model.named_parameters()])
            return model
        sent.clear()
        with meshes.job(comm, make, {"dp": comm.size}, optimizer=partial(optim.SGD, lr=0.1), bucket_mb=0.0005) as run:
            sent.clear()
            meshes.step_losses(run, 1)
            trained_names = [s for s in run.state.model.storage.segments if s.parameter.requires_grad]
            assert sum(s.parameter.size for s in trained_names) == size
            assert 4 * size <= sum(sent) < 4 * size + 64 * len(trained_names), (sent, size)
