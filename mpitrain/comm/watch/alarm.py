"""The alarm of a rank for which MPI does not start, where the watcher that would say so has ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from mpitrain.comm.job.start import launched_rank
from mpitrain.comm.job.turn import claim_file
from mpitrain.errors import StallError

ALARM_S = 5.0  # a rank waits so much longer for MPI's start than a watcher does


def set_alarm(library: Any, seconds: float) -> Callable[[], object]:
    """Ends this rank if MPI has not started a while after a watcher would have said so.

    MPI's start holds the interpreter's lock, so the alarm is in C; without a compiler Python's fault handler is one, with
    stacks and exit code 1. What comes back stops it. The program's own timer is left alone.
    """
    (rank, size), late = launched_rank(), seconds + min(seconds, ALARM_S)
    if size == 1 or signal.getitimer(signal.ITIMER_REAL)[0]:
        return lambda: None
    text = (f"\nmpitrain: E_STALL rank={rank}/{size} host={socket.gethostname()} phase=start: MPI has not started for "
            f"{late:.0f} s, and nobody watches: the first rank of this node, or its watcher, has probably ended; see that "
            "all ranks start, or raise train.start_s\n")
    if library is not None:
        library.leave_in(min(int(late * 1000), 2**31 - 1), StallError.exit_code, text.encode(), os.fsencode(claim_file()))
        stop: Callable[[], object] = library.leave_not
        return stop
    faulthandler.dump_traceback_later(late, exit=True, file=2)
    return faulthandler.cancel_dump_traceback_later
