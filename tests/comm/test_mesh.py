"""What the mesh says when the ranks do not fit; no MPI needed."""

from __future__ import annotations

import re
from itertools import product

import pytest

from mpitrain.errors import MeshError
from mpitrain.schedules.grid import AXES, REPLICAS, Grid, fit


def test_dp_0_takes_what_is_left() -> None:
    assert fit(12, pp=2, dp=0, tp=3) == {"site": 1, "pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 3}


@pytest.mark.parametrize(("arguments", "message"), [
    ((6, 2, 4, 1), "mesh pp=2 x dp=4 x tp=1 needs 8 ranks, found 6; set mesh.dp=3 or run with -n 8"),
    ((6, 1, 4, 4), "mesh pp=1 x dp=4 x tp=4 needs 16 ranks, found 6; run with -n 16"),
    ((3, 2, 0, 1), "mesh pp=2 x tp=1 needs a multiple of 2 ranks, found 3; "
                   "run with -n 4, or change mesh.pp or mesh.tp"),
    ((6, 1, 0, 2, 2), "mesh pp=1 x ep=2 x tp=2 needs a multiple of 4 ranks, found 6; "
                      "run with -n 8, or change mesh.pp or mesh.ep or mesh.tp"),
    ((2, 1, 0, 1, 1, 1, 4), "mesh site=4 x pp=1 x tp=1 needs a multiple of 4 ranks, found 2; "
                            "run with -n 4, or change mesh.site or mesh.pp or mesh.tp"),
    ((4, 0, 0, 1), "mesh.pp=0 must be at least 1"),
    ((4, 1, -1, 1), "mesh.dp=-1 must be at least 0 (0: what the others leave)"),
])
def test_a_mesh_that_does_not_fit_says_what_would(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(message)}$"):
        n, *lengths = arguments
        fit(n, **dict(zip(("pp", "dp", "tp", "ep", "cp", "site"), lengths)))


def test_the_numbers_of_ranks_go_along_the_axes_in_order_tp_fastest() -> None:
    lengths = {"site": 1, "pp": 2, "dp": 3, "ep": 2, "cp": 1, "tp": 2}
    coordinates = [dict(zip(AXES, each)) for each in product(*(range(lengths[axis]) for axis in AXES))]
    grids = [Grid(lengths, each) for each in coordinates]
    assert [grid.rank for grid in grids] == list(range(24)) and str(grids[0]) == "pp=2 x dp=3 x ep=2 x tp=2"
    assert {grid.n_places for grid in grids} == {6} and [grid.place for grid in grids[::2]] == [*range(6)] * 2
    two = {**lengths, "site": 2}
    first, last = Grid(two), Grid(two, {axis: n - 1 for axis, n in two.items()})
    assert (last.rank, last.place, last.n_places, str(last)) == (47, 11, 12, "site=2 x pp=2 x dp=3 x ep=2 x tp=2")
    assert first.count(REPLICAS) == 6, "sites add up no gradients"
    assert Grid({}).rank == 0 and not Grid({"dp": 2, "cp": 2}).cuts_model and Grid({"ep": 2}).cuts_model
