"""The MPI errors that say that another rank was lost; only this file knows them."""

from __future__ import annotations

import sys
from types import TracebackType

from mpitrain.errors import PeerError, StallError

# IN_STATUS: a death first seen inside a call on several requests. OTHER: a connection that broke, for which MPI has no class.
CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_IN_STATUS", "ERR_OTHER")


def says_lost(error: BaseException | None) -> bool:
    """Whether an error is MPI's own and its class says that a rank was lost. Never starts MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    known = {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in CLASSES} - {mpi.ERR_UNKNOWN}   # MPICH gives this to classes it lacks
    return error.Get_error_class() in known


def is_lost(error: BaseException) -> bool:
    """Whether an error, of MPI or of ours, says that a rank was lost; one that stands still is not."""
    return says_lost(error) or (isinstance(error, PeerError) and not isinstance(error, StallError))


class lost_peer:
    """``with lost_peer(what):`` raises PeerError where `says_lost`; all other errors, a wrong call among them, stay as they are.

    `what` is made text only for a PeerError.
    """

    __slots__ = ("_what",)

    def __init__(self, what: object):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if says_lost(error):
            raise PeerError(f"{self._what}: MPI reports {error}; another rank was probably lost") from error
