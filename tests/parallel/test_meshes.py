"""Every mesh of 1 to 8 ranks with every schedule, and runs from the command line that cut layers."""

from __future__ import annotations

import pytest
from launch import ROOT, mpirun


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("n", [1, 2, 4, 6, 8])
def test_every_mesh_with_every_schedule_has_the_losses_of_one_rank(n, tmp_path):
    result = mpirun(n, "-m", "pytest", "-q", "-x", "-p", "pytest_mpi", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--with-mpi",
                    ROOT / "tests/parallel/mesh_mpi.py", "-k", "every_mesh or checkpoint", timeout=2300, cwd=ROOT,
                    env={"PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MPITRAIN_EVERY_MESH": "1",
                         "MPITRAIN_TEST_LIMIT": "1200"})
    assert result.rc == 0, result.out[-6000:] + result.err[-6000:]
