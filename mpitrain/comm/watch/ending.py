"""The end of a node's ranks, and of their launcher where it does not end by itself."""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.record import LEAVE, LEAVE_SIGNAL
from mpitrain.comm.watch.seen import ANSWER_S, BORN, CONTINUE, KILL, Rank, stat

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")


def end_ranks(ranks: list[Rank], *, leaves: bool) -> None:
    """End them with the exit code of a stall, by LEAVE_SIGNAL if that `leaves`; one that can do nothing of the kind is killed."""
    for rank in ranks:
        rank.signal(LEAVE_SIGNAL) if leaves else rank.say(LEAVE)
        rank.signal(CONTINUE)
    limit = time.monotonic() + ANSWER_S
    while any(rank.state for rank in ranks) and time.monotonic() < limit:
        time.sleep(0.01)
    for rank in ranks:
        rank.signal(KILL)


def end_launcher(launcher: int, seconds: float) -> None:
    """Kill Open MPI's mpirun, or its daemon on another host, if it does not end by itself within `seconds`.

    With the network down, the two wait for each other for minutes; two SIGTERM or two SIGINT did not end them (5.0.11).
    """
    with ignoring(OSError), open(f"/proc/{launcher}/comm") as file:
        known, born = file.read().strip() in LAUNCHERS, stat(launcher)[BORN]
        limit = time.monotonic() + seconds
        while known and stat(launcher)[BORN] == born and time.monotonic() < limit:
            time.sleep(0.01)
        if known and stat(launcher)[BORN] == born:
            os.kill(launcher, KILL)
