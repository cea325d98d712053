"""Whole runs in 16 bits on the stand-in for a GPU: near float32's, the same bits in any cut of states and after a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import xp
from sharding_mpi import Losses, gpt, gpt_of, job_of, mlp, numbers, tokens

from mpitrain.backend import Device
from mpitrain.checkpoint import store
from mpitrain.checkpoint.state import State
from mpitrain.comm.mesh import Mesh
from mpitrain.config.sections import STATES
from mpitrain.placement.bytes import predicted
from mpitrain.train.build import assembly
from mpitrain.train.build.assembly import Job

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
HALF = ["bfloat16", "float16"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "select_device", lambda name, rank: Device("gpu", xp))


@pytest.fixture
def shared_folder(comm: Any) -> Iterator[Path]:
    """A folder that all ranks see."""
    with TemporaryDirectory() as mine:
        yield Path(comm.bcast(mine))
        comm.Barrier()


def run_of(mesh: Mesh, kind: str, precision: str, model: Any, inputs: Any, **options: Any) -> Job:
    return job_of(mesh, kind if mesh.size("dp") > 1 else "none", model, inputs, device="gpu", precision=precision, **options)


def seen_of(job: Job) -> list[float]:
    found: Losses = job.trainer.observers[-1]                                    # type: ignore[assignment]
    return found.seen


def trained(comm: Any, kind: str, precision: str, model: Any, inputs: Any, pp: int = 1, **options: Any) -> Any:
    """(losses, norms and metrics, hashes) of a run."""
    mesh = Mesh(comm, pp=pp)
    job = run_of(mesh, kind, precision, model, inputs, **options)
    job.fit()
    found = seen_of(job), job.state.hashes()
    mesh.close()
    return found


@pytest.mark.parametrize("precision", HALF)
def test_a_run_has_nearly_the_losses_of_float32(comm: Any, precision: str) -> None:
    full, _ = trained(comm, "none", "float32", gpt(), tokens(), steps=2)
    whole, _ = trained(comm, "none", precision, gpt(), tokens(), steps=2)
    np.testing.assert_allclose(whole, full, rtol=3e-2)
    assert whole != full


def test_any_cut_of_states_has_the_bits_of_whole_ones(comm: Any) -> None:
    options = {"micro_batches": comm.size, "steps": 3}
    whole = trained(comm, "none", "bfloat16", mlp(), numbers(), **options)
    for kind in STATES[1:] if comm.size > 1 else ():
        found = trained(comm, kind, "bfloat16", mlp(), numbers(), **options)
        np.testing.assert_allclose(found[0], whole[0], rtol=1e-3)
        assert found[1] == whole[1] or comm.size > 2, kind


def test_stages_send_each_other_16_bits(comm: Any) -> None:
    if comm.size % 2:
        pytest.skip("an odd number of ranks")
    options = {"micro_batches": 2 * comm.size, "steps": 2}
    whole, _ = trained(comm, "none", "bfloat16", gpt(), tokens(), **options)
    found, _ = trained(comm, "none", "bfloat16", gpt(), tokens(), pp=2, **options)
    np.testing.assert_allclose(found, whole, rtol=1e-2)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("kind", ["none", "parameters"])
def test_a_checkpoint_has_float32_and_the_run_goes_on_with_the_same_bits(comm: Any, kind: str, precision: str,
                                                                         shared_folder: Path) -> None:
    options: dict[str, Any] = {"micro_batches": comm.size, "steps": 6}
    mesh = Mesh(comm)
    first = run_of(mesh, kind, precision, mlp(), numbers(), **{**options, "steps": 3})
    first.fit()
    saved = first.state.hashes()
    store.save(shared_folder, 3, first.state.pieces(), {"choices": {}}, first.channel)
    first.channel.barrier()
    mesh.close()
    found = store.load(shared_folder / "step-00000003")
    assert {found.arrays[name].dtype.name for name in found.arrays if name.startswith("parameters/")} == {"float32"}
    weight = found.read(next(name for name in found.arrays if name.endswith("weight")))
    assert (weight.view(np.uint32) & 0xFFFF).any(), "values are not rounded"
    whole, hashes = trained(comm, kind, precision, mlp(), numbers(), **options)
    mesh = Mesh(comm)
    job = run_of(mesh, kind, precision, mlp(), numbers(), **options)
    job.resume(found)
    assert job.state.hashes() == saved
    job.fit()
    assert job.state.hashes() == hashes and seen_of(job) == whole[-len(seen_of(job)):]
    mesh.close()


def test_another_precision_goes_on_from_the_values_in_float32_and_so_does_the_host(comm: Any, shared_folder: Path) -> None:
    mesh = Mesh(comm)
    first = run_of(mesh, "none", "bfloat16", mlp(), numbers(), steps=3, micro_batches=comm.size)
    first.fit()
    store.save(shared_folder, 3, first.state.pieces(), {"choices": {}}, first.channel)
    first.channel.barrier()
    mesh.close()
    found = store.load(shared_folder / "step-00000003")
    for precision in ("float32", "float16"):
        mesh = Mesh(comm)
        job = run_of(mesh, "none", precision, mlp(), numbers(), steps=6, micro_batches=comm.size)
        job.resume(found)
        assert job.state.hashes() == first.state.hashes()
        job.fit()
        assert np.isfinite(seen_of(job)).all()
        mesh.close()
    model = mlp()
    model.initialize(0, "float16")
    state = State(model)
    state.load_parameters(found)
    assert state.hashes()["parameters_sha256"] == first.state.hashes()["parameters_sha256"]
    assert {p.dtype.name for p in model.parameters()} == {"float32"}


def test_a_rank_keeps_what_the_formula_says(comm: Any) -> None:
    for kind in ("none", "optimizer", "gradients") if comm.size > 1 else ("none",):
        mesh = Mesh(comm)
        job = run_of(mesh, kind, "bfloat16", model := gpt_of(192), tokens(), steps=1, micro_batches=comm.size)
        np.testing.assert_allclose(job.trainer.update.measured(), predicted(model.count_parameters(), kind, comm.size, copy=2),
                                   rtol=0.02)
        mesh.close()
