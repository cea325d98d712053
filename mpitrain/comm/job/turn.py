"""Who says why a job ends: one process of a node, the first that claims it. Ranks, their alarms in C and the watcher ask here."""

from __future__ import annotations

import os
import socket
import sys


def claim_file() -> str:
    """A file that the one who says it makes, in the launcher's own folder of the job; "" where there is no such folder."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR")             # the launcher removes it with the job
    return os.path.join(folder, f"mpitrain-{_job()}".replace("/", "-")) if folder else ""


def claim() -> bool:
    """Whether this process is the first of the job on this node."""
    if path := claim_file():
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            return True
        except FileExistsError:
            return False
        except OSError:
            pass
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


def _job() -> str:
    launched = "{}.{}".format(os.environ.get("SLURM_JOB_ID", f"p{os.getppid()}"), os.environ.get("SLURM_STEP_ID", ""))
    return os.environ.get("PMIX_NAMESPACE") or launched
