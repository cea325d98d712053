"""Rank and settings from the launcher's environment, before MPI starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, clean_environment, is_open_mpi, mpirun
from runs import write

from mpitrain.backend import native
from mpitrain.comm.job import launcher
from mpitrain.comm.job.launcher import strangers
from mpitrain.comm.job.start import (
    ONE_NODE,
    STARTED,
    launched_by_mpirun,
    launched_rank,
    local_rank,
    on_one_node,
    set_fast_start,
)


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


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_each_signal_ends_a_process_with_the_exit_code_that_was_set_for_it() -> None:
    program = """if True:
        import os, signal, sys
        from mpitrain.backend import native
        library = native.load("leave")
        assert [library.leave_on(60, 75), library.leave_on(signal.SIGALRM, 3), library.leave_on(65, 1)] == [0, 0, -1]
        os.kill(os.getpid(), int(sys.argv[1]))"""
    for number, code in ((60, 75), (14, 3)):
        assert subprocess.run([sys.executable, "-c", program, str(number)], env=clean_environment()).returncode == code


@pytest.mark.promise("A12")
@pytest.mark.parametrize("fails", [True, False])
def test_a_failure_of_mpis_own_end_after_a_loss_is_a_line_and_keeps_the_exit_code(fails: bool) -> None:
    program = """if True:
        import sys
        from mpi4py import MPI
        from mpitrain.comm.job.start import finalize_within
        def fail():
            raise MPI.Exception(MPI.ERR_OTHER)
        if sys.argv[1] == "True":
            MPI.Finalize = fail
        finalize_within(5.0, 3)
        sys.exit(3)"""
    done = subprocess.run([sys.executable, "-c", program, str(fails)], env=clean_environment(), capture_output=True, text=True)
    said = r"warning: the program is done, but MPI's own end failed: .+\n" if fails else ""
    assert done.returncode == 3 and re.fullmatch(said, done.stderr), done.stderr


def test_the_fast_settings_are_for_one_node() -> None:
    one = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    two = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert on_one_node(one) and on_one_node({}) and not on_one_node(two)
    assert not on_one_node({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"})
    set_fast_start(one)
    set_fast_start(two)
    assert one.items() >= ONE_NODE.items() and not ONE_NODE.keys() & two.keys()
    assert not set_fast_start({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert set_fast_start({}) and set_fast_start({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})      # not a task
    for name in STARTED:                                                # such a rank has others, whose number it does not say
        assert not set_fast_start(only := {name: "0"}) and only["OMPI_MCA_btl"] != "self", name
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


@pytest.mark.promise("A11")
@pytest.mark.skipif(not is_open_mpi(), reason="other MPIs map shared memory for one rank, too, and remove it at its end")
def test_a_rank_without_a_launcher_leaves_no_shared_memory_and_no_setting_for_a_launcher_that_it_starts(tmp_path: Path) -> None:
    code = ("import os; before = set(os.listdir('/dev/shm')); from mpitrain.comm.job import start; start.start()\n"
            "new = set(os.listdir('/dev/shm')) - before\n"
            "mapped = [line for line in open('/proc/self/maps') if any(f'/dev/shm/{name}' in line for name in new)]\n"
            "assert not mapped, mapped\n"
            "assert os.environ['OMPI_MCA_btl'] == start.ONE_NODE['OMPI_MCA_btl']")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=clean_environment(), timeout=60)


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


# ---- a launcher and an MPI library that do not know each other ------------------------------------------------------------

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"


@pytest.mark.parametrize(("environment", "library", "said"), [
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, OPEN_MPI, r"mpiexec of MPICH or Intel MPI started 3 .*, Open MPI v5.0.11.*mpirun -n 3 "),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, OPEN_MPI, r'^srun started 3 .*, or "srun --mpi=pmix -n 3 \.\.\."'),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, "MPICH Version: 4.1.3", r'mpiexec -n 3 .*, or "srun --mpi=pmi2 -n 3'),
    ({"OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "1"}, "Intel(R) MPI Library", r"^Open MPI's mpirun started .*mpiexec -n 3 ")])
def test_strangers_are_told_which_launcher_which_library_and_which_command(
        environment: dict[str, str], library: str, said: str) -> None:
    error = strangers(3, library, environment)
    assert re.search(said, error.message) and "MPI4PY_LIBMPI" in error.message
    assert len(f"mpitrain: E_USAGE rank=0/3 host={'h' * 30}: {error.message}") < 500


@pytest.mark.parametrize("names", [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "PMI_SIZE")])
def test_processes_that_mpi_does_not_connect_end_in_one_line_and_train_nothing(tmp_path: Path, names: tuple[str, str]) -> None:
    """As under `srun` without PMI and MPICH's mpiexec; one process alone trains, as test_without_a_launcher shows."""
    config = write(tmp_path)
    script = "\n".join(f"{names[0]}={rank} {sys.executable} -m mpitrain train {config} run.out=a & p{rank}=$!" for rank in (0, 1))
    found = subprocess.run(["bash", "-c", f"{script}\nwait $p0; echo $?; wait $p1; echo $?"], cwd=tmp_path, timeout=60,
                           env={**clean_environment(), names[1]: "2"}, capture_output=True, text=True)
    assert found.stdout.split()[-2:] == ["64", "64"], found.stdout + found.stderr
    line, = (line for line in found.stderr.splitlines() if line.startswith("mpitrain:"))
    assert "E_USAGE rank=0/2" in line and "each is a job of its own to the MPI library here, " in line
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_missing_mpi_library_is_a_line_that_names_the_setting(tmp_path: Path, named: bool) -> None:
    """Debian's MPICH is libmpich.so.12, which mpi4py's wheel does not look for."""
    program = "import sys; sys.modules['mpi4py.MPI'] = None\nfrom mpitrain.__main__ import main; main()"
    env = {**clean_environment(), "MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")} if named else clean_environment()
    command = ["-m", "mpitrain"] if named else ["-c", program]
    found = subprocess.run([sys.executable, *command, "train", str(write(tmp_path)), "run.out=a"], cwd=tmp_path, timeout=60,
                           env=env, capture_output=True, text=True)
    assert found.returncode == 66, found.stderr
    line, = (line for line in found.stderr.splitlines() if line.startswith("mpitrain:"))
    assert "E_MISSING" in line and "MPI4PY_LIBMPI" in line
    assert ("mpi4py cannot load the library that MPI4PY_LIBMPI names: " if named else "mpi4py finds no MPI library (") in line


def test_a_library_of_debian_is_found_for_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libmpich.so.12").touch()
    monkeypatch.setattr(launcher, "PLACES", (f"{tmp_path}/libmpich.so.*",))
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    said = launcher.no_library(RuntimeError("cannot load MPI library\nlibmpi.so.40: cannot open")).message
    assert said == (f"mpi4py finds no MPI library (libmpi.so.40: cannot open); set MPI4PY_LIBMPI={tmp_path}/libmpich.so.12, "
                    f"and start with the mpirun of that library")
