"""The mesh at every factorisation of the ranks that run this."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.mesh import Mesh
from mpitrain.schedules.grid import AXES, REPLICAS


def factorisations(n: int) -> list[tuple[int, ...]]:
    """Lengths of the axes."""
    found = [lengths for lengths in product(range(1, n + 1), repeat=len(AXES)) if math.prod(lengths) == n]
    return found if n < 8 else found[::3]


def test_tp_is_innermost_and_sites_are_outermost(comm: Any) -> None:
    for lengths in factorisations(comm.size):
        mesh = Mesh(comm, **dict(zip(AXES, lengths)))
        place = tuple(mesh.coordinate(axis) for axis in AXES)
        assert np.ravel_multi_index(place, lengths) == comm.rank
        assert tuple(mesh.size(axis) for axis in AXES) == lengths
        site, _, dp, ep, *_ = place
        n_sites, _, n_dp, n_ep, *_ = lengths
        assert (mesh.place, mesh.n_places) == ((site * n_dp + dp) * n_ep + ep, n_sites * n_dp * n_ep)
        mesh.close()


def test_a_sum_along_axes_adds_the_ranks_that_differ_there_only(comm: Any) -> None:
    for lengths in factorisations(comm.size):
        mesh = Mesh(comm, **{axis: n for axis, n in zip(AXES, lengths) if axis != "dp"})
        grid = np.arange(comm.size).reshape(lengths)
        for axes in [*AXES, ("pp", "dp"), ("dp", "tp"), ("tp", "pp"), REPLICAS, ("pp", "ep", "tp"), AXES]:
            channel = mesh.channel(axes, "test")
            mine = np.array([comm.rank])
            channel.allreduce(mine, name="rank")
            along = tuple(i for i, axis in enumerate(AXES) if axis in axes)
            expected = np.broadcast_to(grid.sum(axis=along, keepdims=True), grid.shape).reshape(-1)[comm.rank]
            assert mine[0] == expected
            assert mesh[axes].size == np.prod([grid.shape[i] for i in along])
        mesh.close()


def test_channels_of_one_mesh_share_their_progress_but_not_their_messages(comm: Any) -> None:
    mesh = Mesh(comm)
    first, second = mesh.channel("dp", "first"), mesh.channel("dp", "second")
    a, b = np.full(100, 1.0), np.full(100, 10.0)
    works = [first.start_allreduce(a, "same name"), second.start_allreduce(b, "same name")]
    if comm.rank % 2:                                         # ranks wait in different orders
        works.reverse()
    for work in works:
        work.wait()
    assert (a == comm.size).all() and (b == 10 * comm.size).all()
    assert len(mesh.progress) == 0
    mesh.close()


def test_a_mesh_takes_a_part_of_the_ranks(comm: Any) -> None:
    half = comm.Split(comm.rank % 2, comm.rank)
    mesh = Mesh(half)
    assert mesh.size("dp") == half.size and mesh.rank == half.rank
    mesh.close()
    half.Free()


def test_an_axis_that_is_not_there_is_refused(comm: Any) -> None:
    mesh = Mesh(comm)
    with pytest.raises(AssertionError, match="axes of the mesh"):
        mesh["xp"]
    mesh.close()
