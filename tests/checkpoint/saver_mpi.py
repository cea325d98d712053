"""A run's checkpoints, written while it trains on, are those that it would have waited for: however ranks keep their state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharding_mpi import gpt, job_of, tokens

from mpitrain.checkpoint.manifest import load
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.mesh import Mesh
from mpitrain.files import hdf5_file
from mpitrain.train import Observer
from mpitrain.train.intervals import Step

SAVED, STEPS, DEADLINE = 2, 6, 30


class Opens(Observer):
    """Lets the writers begin when training has changed everything twice since the checkpoint."""

    def __init__(self, gate: threading.Event, saver: Any):
        self.gate, self.saver, self.busy = gate, saver, False

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        if step == SAVED + 2:
            self.busy = self.saver.busy and not self.gate.is_set()
            self.gate.set()


def run(comm: Any, path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, kind: str, pp: int, **options: Any) -> bool:
    """Trains with a checkpoint in between; whether training had gone on before anything of it was written."""
    gate, write = threading.Event(), hdf5_file.write_hdf5

    def waiting(file: Path, arrays: Any) -> Any:
        assert not asynchronous or gate.wait(DEADLINE)
        return write(file, arrays)
    monkeypatch.setattr(hdf5_file, "write_hdf5", waiting)
    mesh = Mesh(comm, pp=pp)
    job = job_of(mesh, kind, gpt(), tokens(), steps=STEPS, every=SAVED, asynchronous=asynchronous, keep=9, best=False, **options)
    folder = RunFolder(path)
    if comm.rank == 0:
        folder.open()
    comm.Barrier()
    job.keep_in(folder, {"seed": 7})
    opens = Opens(gate, job.trainer.saver)
    job.trainer.observers.append(opens)
    job.fit()
    folder.close()
    monkeypatch.undo()
    mesh.close()
    return opens.busy


@pytest.mark.parametrize(("kind", "pp", "options"), [
    ("none", 1, {}), ("none", 1, {"node_shared": True}), ("parameters", 1, {}), ("optimizer", 2, {}),
    ("none", 1, {"offload": "file", "offload_folder": "here"})])
def test_a_checkpoint_written_while_training_goes_on_has_the_bits_of_its_step(
        comm: Any, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pp: int, options: dict[str, Any]) -> None:
    if comm.size % pp or (options.get("node_shared") and comm.size == 1):
        pytest.skip("needs more ranks")
    if "offload_folder" in options:
        options = {**options, "offload_folder": str(mpi_tmp_path)}
    assert not run(comm, mpi_tmp_path / "waiting", False, monkeypatch, kind, pp, **options)
    assert run(comm, mpi_tmp_path / "asynchronous", True, monkeypatch, kind, pp, **options)
    comm.Barrier()
    for step in range(SAVED, STEPS + 1, SAVED):
        waiting, asynchronous = (load(mpi_tmp_path / name / f"checkpoints/step-{step:08d}")
                                 for name in ("waiting", "asynchronous"))
        assert list(waiting.arrays) == list(asynchronous.arrays) and waiting.meta == asynchronous.meta
        assert waiting.parts == asynchronous.parts
        for name in waiting.arrays:
            np.testing.assert_array_equal(waiting.read(name), asynchronous.read(name), err_msg=f"step {step}: {name}")
