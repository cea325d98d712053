"""Start MPI once, with settings that make it start fast on one node; know the rank before that."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.errors import print_warning, text_of

if TYPE_CHECKING:
    from mpi4py import MPI

# On one node Open MPI needs shared memory only, but probes libfabric and UCX too: MPI_Init took 1.2 s with the probing and
# 0.07 s without (Open MPI 5.0.11 of PyPI, 2 ranks). These names hold for Open MPI 4 and 5; other MPIs ignore them.
ONE_NODE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}

# Without a launcher nobody removes the 16 MiB of shared memory that Open MPI 5.0.11 makes for messages (sm_segment.*).
ALONE = {"OMPI_MCA_btl": "self"}

# For ranks that go on when others are lost. By the shared-memory transport of Open MPI 5.0.11 a survivor was ended by MPI ("Send
# error after request freed") in 1 of 13 runs, by TCP in none of 40. Ranks that wait for all in MPI_Finalize did not come back
# from it in 4 of 7 small programs, so none waits.
SURVIVING = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_async_mpi_finalize": "1"}
LOOPBACK = {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}

# (rank, size) as launchers put them: Open MPI's mpirun, Hydra (MPICH, Intel MPI) and Slurm's PMI-2, PMIx without Open MPI, srun.
LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
             ("PMIX_RANK", "PMIX_SIZE"), ("PMIX_RANK", "SLURM_NTASKS"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
# What tells of a launcher that may not say how many it started: prun, Flux, PALS, ALPS, those of PMI-1 and PMI-2. MPI asks it.
STARTED = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "FLUX_TASK_RANK", "PALS_RANKID", "ALPS_APP_PE",
           "OMPI_COMM_WORLD_RANK")
# Seconds. Where MPI does not connect the processes of a launcher, others that fail alike look 1.5 s later than the one that
# prints, and a little more where they started later; all end within 4 s.
HELD_S = 2.5
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class World:
    """All ranks of the job; `comm` is a private duplicate whose errors return (as exceptions) instead of ending the job."""

    comm: MPI.Intracomm
    rank: int
    size: int


_world: World | None = None


def start() -> World:
    """Initialise MPI (once; later calls return the same World). Works under mpirun, srun, or no launcher at all (1 rank).

    UsageError where the launcher started several processes that MPI does not connect.
    """
    global _world
    if _world is None:
        everyone = _everyone()
        from mpi4py import MPI
        if everyone.size == 1 < launched_rank()[1]:           # no other size: launchers count otherwise where steps make one job
            from mpitrain.comm.job.launcher import strangers
            raise strangers(launched_rank()[1], library_version(), os.environ)
        everyone.Set_errhandler(MPI.ERRORS_RETURN)
        comm = everyone.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        _world = World(comm, comm.rank, comm.size)
    return _world


def started() -> World | None:
    """The World if `start` was called, else None; never starts MPI."""
    return _world


def abort(exit_code: int) -> NoReturn:
    """End all ranks of the job; starts MPI first if need be, which may wait for the others, so the caller bounds it."""
    with contextlib.suppress(Exception):                      # memory or files may have run out
        from mpitrain.comm.job.launcher import abort_in_few_words
        abort_in_few_words(exit_code)
    everyone = _everyone()
    if everyone.size == 1 < launched_rank()[1]:               # MPI ends nobody else: the others see who has said why, and go
        time.sleep(HELD_S)
        os._exit(exit_code)
    everyone.Abort(exit_code)
    raise AssertionError("MPI_Abort returned")


def finalize_within(seconds: float, exit_code: int) -> None:
    """Finalize MPI; where that takes longer or fails, as it may after a loss, the process ends with this code, and mpirun with 1.

    A failure is told in a line, and no other attempt follows at the interpreter's end.
    """
    from mpi4py import MPI

    from mpitrain.backend import native
    library = native.load("leave")                            # without a compiler the signal ends the process with another code
    if library is not None:
        library.leave_on(signal.SIGALRM, exit_code)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        MPI.Finalize()
    except MPI.Exception as error:
        print_warning(f"the program is done, but MPI's own end failed: {' '.join(text_of(error).split())}")
        os._exit(exit_code)
    signal.setitimer(signal.ITIMER_REAL, 0)


def tag_upper_bound() -> int:
    """The largest message tag, at least 32767. Open MPI 5 knows it of COMM_WORLD but not of Cartesian communicators."""
    from mpi4py import MPI
    return int(_everyone().Get_attr(MPI.TAG_UB) or 32767)


def library_version() -> str:
    """The MPI library's own name and version, on one line."""
    from mpi4py import MPI
    return " ".join(MPI.Get_library_version().strip("\0 \n").split())


def _everyone() -> MPI.Intracomm:
    """COMM_WORLD, with MPI initialised (the import does that). MissingError without an MPI library."""
    alone = set_fast_start(os.environ)
    # mpi4py warns of another library's launcher in four lines a rank; `start` says it in one line a job.
    warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
    try:
        if launched_by_mpirun():
            refuse_mpich()
        from mpi4py import MPI
    except (RuntimeError, ImportError) as error:              # the wheel's loader, or the system's
        from mpitrain.comm.job.launcher import no_library
        raise no_library(error) from error
    if alone:
        os.environ.update(ONE_NODE)                           # a launcher that this process starts hands its settings to ranks
    return MPI.COMM_WORLD


def refuse_mpich() -> None:
    """UsageError for a library of MPICH's kind without PMIx under Open MPI's mpirun: MPI_Init might end the process."""
    with contextlib.suppress(ImportError, AttributeError):    # an mpi4py that was built for one MPI has no such module
        from mpi4py import _mpiabi
        abi: Any = _mpiabi
        if abi._get_mpiabi() == "mpich" and launched_rank()[1] > 1:      # it loads the library, as importing MPI does
            from mpitrain.comm.job.launcher import maps, strangers
            if "/libpmix." not in maps():
                raise strangers(launched_rank()[1], "MPICH", os.environ)


def set_fast_start(environment: MutableMapping[str, str]) -> bool:
    """Set `ONE_NODE` where all ranks share this node and the user set none of it; must come before MPI_Init.

    True where `ALONE` is set too, for a rank without a launcher.

    The three settings belong together: half of them beside a user's own choice of transport may leave no usable one.
    """
    ours = on_one_node(environment) and not any(name in environment for name in ONE_NODE)
    alone = ours and not launched(environment) and not any(name in environment for name in STARTED)
    environment.update(ONE_NODE if ours else {}, **(ALONE if alone else {}))
    return alone


def set_for_survivors(environment: MutableMapping[str, str]) -> None:
    """Set `SURVIVING`, and within a node its own network, where the user set none of it; must come before MPI_Init."""
    if not any(name in environment for name in SURVIVING):
        environment.update(SURVIVING)
        if on_one_node(environment) and not any(name.startswith("OMPI_MCA_btl_tcp_if") for name in environment):
            environment.update(LOOPBACK)


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Whether the launcher says that all ranks share this node; one rank does. Unknown launchers count as several nodes."""
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is not None:
        return size == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return launched_rank(environment)[1] == 1


def launched_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, size) from the launcher's environment variables, without starting MPI; (0, 1) without a launcher.

    Inside an `sbatch` script but outside `srun`, Slurm's job-wide variables are set too; only the step's count says that
    this process is a task, hence SLURM_STEP_NUM_TASKS.
    """
    for rank, size in LAUNCHERS:
        if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[rank]), int(environment[size])
    return 0, 1


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process, also if it started one alone."""
    return any(rank in environment and size in environment for rank, size in LAUNCHERS)


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's number among those the launcher started on this node; 0 when no launcher says."""
    return next((int(environment[name]) for name in LOCAL_RANKS if environment.get(name, "").isdigit()), 0)


def launched_by_mpirun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Open MPI's mpirun started us: it ends the whole job when one rank exits non-zero, even before MPI_Init."""
    return "OMPI_COMM_WORLD_SIZE" in environment
