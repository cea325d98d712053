"""What run.json says about where a run ran: enough, and nothing secret."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.train.machine.environment import blas, describe, environment, versions

ROOT = Path(__file__).resolve().parents[2]


def test_versions_hosts_mesh_and_threads_are_told_as_json() -> None:
    told = describe(mpi_library="Open MPI v5\n", hosts=["a", "a", "b"], mesh={"pp": 1, "dp": 3, "tp": 1}, threads=2, device="cpu")
    assert json.loads(json.dumps(told)) == told
    assert (told["python"], told["versions"]["numpy"]) == (platform.python_version(), np.__version__)
    assert (told["mpi_library"], told["ranks"], told["hosts"]) == ("Open MPI v5", 3, ["a", "a", "b"])
    assert (told["mesh"], told["threads"], told["device"]) == ({"pp": 1, "dp": 3, "tp": 1}, 2, "cpu")


def test_the_linear_algebra_library_is_named_with_its_kind_of_core() -> None:
    libraries = blas()
    assert any({"internal_api", "version", "num_threads"} <= set(library) for library in libraries)
    assert all("filepath" not in library for library in libraries)          # a path tells of the user's folders


@pytest.mark.promise("F9")
def test_the_environment_is_never_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SLURM_JWT", "OMPI_MCA_secret", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "canary-7f3a")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert environment()["SLURM_JOB_ID"] == "42"
    assert "canary-7f3a" not in json.dumps(describe())


def test_asking_for_versions_imports_none_of_the_packages() -> None:
    program = ("import sys; from mpitrain.train.machine.environment import versions; found = versions(); "
               "print(sorted({'numba', 'mpi4py', 'h5py', 'rich'} & set(sys.modules)), 'numba' in found)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
    assert versions()["numpy"] == np.__version__


def test_the_package_s_files_import_neither_mpi_nor_h5py_nor_rich() -> None:
    program = ("import sys; from mpitrain.checkpoint import hashes, run_folder, store; from mpitrain.files import hdf5_file; "
               "from mpitrain.train.machine import environment; from mpitrain.train.observers import log; "
               "print(sorted({'numba', 'mpi4py', 'h5py', 'rich'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
