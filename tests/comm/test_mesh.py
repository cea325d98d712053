"""What the mesh says when the ranks do not fit; no MPI needed."""

from __future__ import annotations

import re

import pytest

from mpitrain.comm.mesh import fit
from mpitrain.errors import MeshError


def test_dp_0_takes_what_is_left() -> None:
    assert fit(12, pp=2, dp=0, tp=3) == {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 3}


@pytest.mark.parametrize(("arguments", "message"), [
    ((6, 2, 4, 1), "mesh pp=2 x dp=4 x tp=1 needs 8 ranks, but mpirun started 6; set mesh.dp=3 or run with -n 8"),
    ((6, 1, 4, 4), "mesh pp=1 x dp=4 x tp=4 needs 16 ranks, but mpirun started 6; run with -n 16"),
    ((3, 2, 0, 1), "mesh pp=2 x dp=0 x tp=1 needs a multiple of 2 ranks, but mpirun started 3; "
                   "run with -n 4, or change mesh.pp or mesh.tp"),
    ((6, 1, 0, 2, 2), "mesh pp=1 x dp=0 x ep=2 x tp=2 needs a multiple of 4 ranks, but mpirun started 6; "
                      "run with -n 8, or change mesh.pp or mesh.ep or mesh.tp"),
    ((4, 0, 0, 1), "mesh.pp=0 must be at least 1"),
    ((4, 1, -1, 1), "mesh.dp=-1 must be at least 0 (0: what the others leave)"),
])
def test_a_mesh_that_does_not_fit_says_what_would(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(message)}$"):
        n, *lengths = arguments
        fit(n, **dict(zip(("pp", "dp", "tp", "ep", "cp"), lengths)))
