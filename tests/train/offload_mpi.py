"""Optimizer state in files: the bits of the run without, on any mesh."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from fakegpu import xp
from sharding_mpi import adam, gpt, job_of, mlp, numbers, tokens

from mpitrain import optim
from mpitrain.backend import Device
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import StorageError
from mpitrain.optim.on_host import OnHost
from mpitrain.train.build import assembly, offload


def lamb(storage: Any) -> optim.Optimizer:
    return optim.LAMB(storage, lr=0.01)


def test_every_mesh_has_its_bits(comm: Any, tmp_path: Path) -> None:
    cases: list[tuple[int, str, Any]] = [(1, "none", lamb), (1, "parameters" if comm.size > 1 else "none", adam)]
    if comm.size % 2 == 0:
        cases.append((2, "gradients" if comm.size > 2 else "none", adam))
    for pp, kind, optimizer in cases:
        hashes = []
        for way in ("none", "file"):
            mesh = Mesh(comm, pp=pp)
            job = job_of(mesh, kind, gpt(), tokens(), optimizer, steps=2, micro_batches=comm.size, offload=way,
                         offload_folder=str(tmp_path))
            job.fit()
            hashes.append(job.state.hashes())
            mesh.close()
        assert hashes[0] == hashes[1]


def test_state_on_the_host_has_the_bits_of_the_devices_update(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run on the stand-in for a GPU."""
    monkeypatch.setattr(assembly, "select_device", lambda name, rank: Device("gpu", xp))
    for kind in ("none", "parameters") if comm.size > 1 else ("none",):
        hashes = []
        for way in ("none", "host"):
            mesh = Mesh(comm)
            job = job_of(mesh, kind, mlp(), numbers(), adam, steps=3, device="gpu", offload=way)
            assert isinstance(job.state.optimizer, OnHost) is (way == "host")
            job.fit()
            hashes.append(job.state.hashes())
            mesh.close()
        assert hashes[0] == hashes[1]


def test_a_rank_without_room_ends_all_of_them_alike(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = offload.reserve

    def reserve(fd: int, nbytes: int, **options: bool) -> None:
        if comm.rank == comm.size - 1:
            raise OSError(errno.ENOSPC, "full")
        room(fd, nbytes, **options)
    monkeypatch.setattr(offload, "reserve", reserve)
    mesh = Mesh(comm)
    with pytest.raises(StorageError, match="a file of [0-9,]+ bytes for optimizer state cannot be made: No space left"):
        job_of(mesh, "none", gpt(), tokens(), steps=1, offload="file", offload_folder=str(tmp_path))
    mesh.close()
