"""A kind of state that the store has never heard of: saved on some ranks, gone on with on others, cut otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from sharding_mpi import gpt, job_of, tokens

from mpitrain.checkpoint import store
from mpitrain.checkpoint.kinds import Kept, Values, in_flat
from mpitrain.checkpoint.manifest import load
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError
from mpitrain.train import Job


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Iterator[Path]:
    yield Path(comm.bcast(str(tmp_path)))
    comm.Barrier()


class Scales(Values):
    """Two numbers, as a quantization might keep them."""

    def __init__(self, found: dict[str, Any]):
        self.found = found
        super().__init__("scales", lambda: self.found, self.take)

    def take(self, found: dict[str, Any]) -> None:
        self.found = found


def add_kinds(job: Job, scales: dict[str, Any]) -> tuple[Kept, Scales]:
    """Averages of what the optimizer updates here, zero; and some numbers."""
    storage: Any = job.state.optimizer.storage                              # type: ignore[union-attr]
    averages = in_flat("averages", storage, storage.new_flat(), job.state.shards is not None)
    kinds = averages, Scales(scales)
    job.state.kept += kinds
    return kinds


def parts(averages: Kept) -> Iterator[tuple[Any, Any]]:
    """(this rank's part of an array, the same elements of numbers that depend on the name and the place in the whole alone)."""
    for one in averages.placed():
        whole = np.random.default_rng(crc32(one.leaf.key.encode())).standard_normal(one.leaf.global_shape, np.float32)
        for part, start in one.boxes(one.array):
            yield part, whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape))]


@pytest.mark.parametrize("kind, other, pp", [("none", "parameters", 1), ("optimizer", "none", 1), ("parameters", "optimizer", 1),
                                             ("none", "optimizer", 2)])
def test_a_new_kind_goes_on_on_other_ranks(comm: Any, folder: Path, kind: str, other: str, pp: int) -> None:
    if comm.size % pp:
        pytest.skip("two stages need an even number of ranks")
    mesh = Mesh(comm, pp=pp)
    job = job_of(mesh, kind, gpt(), tokens(), steps=2)
    averages, _ = add_kinds(job, {"low": np.float32(0.25), "high": np.arange(3.0)})
    count = 0
    for part, wanted in parts(averages):
        part[...] = wanted
        count += part.size
    assert count > 0
    store.save(folder, 1, job.state.pieces(), {"choices": {}}, job.channel)
    comm.Barrier()
    mesh.close()
    fewer = comm.Split(comm.rank < max(comm.size - 1, 1), comm.rank)
    if comm.rank < max(comm.size - 1, 1):
        mesh = Mesh(fewer)
        job = job_of(mesh, other if fewer.size > 1 else "none", gpt(), tokens(), steps=2)
        averages, scales = add_kinds(job, {"low": np.float32(0.0), "high": np.zeros(3)})
        job.resume(load(folder / "step-00000001"))
        for part, wanted in parts(averages):
            np.testing.assert_array_equal(part, wanted)
        assert scales.found["low"] == 0.25 and scales.found["high"].tolist() == [0.0, 1.0, 2.0]
        without = job_of(mesh, "none", gpt(), tokens(), steps=2)
        without.resume(load(folder / "step-00000001"))                      # what nobody asks for is left where it is
        assert without.state.hashes() == job.state.hashes()
        mesh.close()
    fewer.Free()


def test_a_checkpoint_without_it_is_refused_before_anything_is_touched(comm: Any, folder: Path) -> None:
    mesh = Mesh(comm)
    job = job_of(mesh, "none", gpt(), tokens(), steps=2)
    store.save(folder, 1, job.state.pieces(), {"choices": {}}, job.channel)
    comm.Barrier()
    before = job.state.hashes()
    next(iter(job.state.parameters.placed())).array[...] += 1.0
    add_kinds(job, {})
    with pytest.raises(CheckpointError, match=r"\d+ missing \(averages/"):
        job.state.restore(load(folder / "step-00000001"))
    assert job.state.hashes() != before
    mesh.close()
