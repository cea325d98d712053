"""Rank and settings from the launcher's environment, before MPI starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, clean_environment, mpirun

from mpitrain.comm.job.start import ONE_NODE, launched_by_mpirun, launched_rank, local_rank, on_one_node, set_fast_start


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, (0, 1)),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"}, (3, 8)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    ({"PMIX_RANK": "5", "SLURM_NTASKS": "6", "SLURM_PROCID": "5"}, (5, 6)),
    ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),                     # the batch script itself, not a task
    ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "8"}, (0, 1)),
])
def test_every_launcher_tells_rank_and_size(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert launched_rank(environment) == expected


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, 0), ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2), ({"MPI_LOCALRANKID": "1"}, 1), ({"SLURM_LOCALID": "3"}, 3)])
def test_every_launcher_tells_the_rank_on_the_node(environment: dict[str, str], expected: int) -> None:
    assert local_rank(environment) == expected


def test_the_fast_settings_are_for_one_node() -> None:
    one = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    two = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert on_one_node(one) and on_one_node({}) and not on_one_node(two)
    assert not on_one_node({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"})
    set_fast_start(one)
    set_fast_start(two)
    assert one.items() >= ONE_NODE.items() and not ONE_NODE.keys() & two.keys()
    assert launched_by_mpirun(one) and not launched_by_mpirun({"PMI_RANK": "0"})


def test_what_the_user_set_stays_and_is_not_mixed_with_ours() -> None:
    environment = {"OMPI_MCA_btl": "tcp,self"}
    set_fast_start(environment)
    assert environment == {"OMPI_MCA_btl": "tcp,self"}


def test_importing_the_package_starts_no_mpi() -> None:
    code = ("import sys, pkgutil, importlib, mpitrain.comm as c\n"
            "for module in pkgutil.iter_modules(c.__path__): importlib.import_module('mpitrain.comm.' + module.name)\n"
            "assert 'mpi4py' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=clean_environment(), timeout=60)


def test_without_a_launcher_there_is_one_rank(tmp_path: Path) -> None:
    code = "from mpitrain.comm.job.start import start; w = start(); assert w is start(); print(w.rank, w.size)"
    found = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=clean_environment(), timeout=60,
                           capture_output=True, text=True)
    assert found.stdout.split() == ["0", "1"]


def test_the_launchers_rank_is_mpis_rank(tmp_path: Path) -> None:
    code = ("from mpitrain.comm.job.start import *; before = launched_rank(); w = start()\n"
            "assert before == (w.rank, w.size), (before, w)\n"
            "assert tag_upper_bound() >= 32767")
    assert mpirun(3, "-c", code, cwd=tmp_path).rc == 0
