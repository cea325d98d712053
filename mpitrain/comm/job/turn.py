"""Who says why a job ends: one process of a node, the first that claims it. Ranks, their alarms in C and the watcher ask here."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping


def claim_file() -> str:
    """A file that the one who says it makes, in the launcher's own folder of the job; "" where there is no such folder."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR")             # the launcher removes it with the job
    return os.path.join(folder, f"mpitrain-{_job()}".replace("/", "-")) if folder else ""


def claim(exit_code: int) -> bool:
    """Whether this process is the first of the job on this node; `exit_code` is what the job ends with then."""
    if path := claim_file():
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        except OSError:
            pass
        else:
            with contextlib.suppress(OSError):
                os.write(file, str(exit_code).encode())
            os.close(file)
            return True
    if not sys.platform.startswith("linux"):
        return True                                           # abstract socket names are Linux's: the line may come twice
    try:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return True                                           # files have run out: better a line twice than never
    try:
        name.bind(f"\0mpitrain-{os.getuid()}-{_job()}")
        name.detach()                                         # the socket stays open, and the name taken, until the end
    except OSError:
        return False
    return True


def claimed_code(own: int) -> int:
    """The exit code of the first one, `own` if that is not known: Open MPI's mpirun with ULFM may take anybody's."""
    with contextlib.suppress(OSError, ValueError), open(claim_file() or os.devnull) as file:
        return int(file.read())
    return own


def leaves_ranks_out(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun goes on when a rank is lost (--with-ft ulfm): it sets this variable for its ranks."""
    return environment.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


def _job() -> str:
    launched = "{}.{}".format(os.environ.get("SLURM_JOB_ID", f"p{os.getppid()}"), os.environ.get("SLURM_STEP_ID", ""))
    return os.environ.get("PMIX_NAMESPACE") or launched
