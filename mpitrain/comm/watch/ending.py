"""The end of a node's ranks, and of their launcher where it does not end by itself."""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.processes import BORN, stat
from mpitrain.comm.watch.record import LEAVE, LEAVE_SIGNAL
from mpitrain.comm.watch.seen import ANSWER_S, CONTINUE, KILL, Rank

LAUNCHER_S = 3.0                          # the launcher has so long to end after its ranks
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")


def end_ranks(ranks: list[Rank], *, leaves: bool) -> None:
    """End them with the exit code of a stall, by LEAVE_SIGNAL if that `leaves`; one that can do nothing of the kind is killed."""
    _leave(ranks, leaves)
    for rank in ranks:
        rank.signal(KILL)


def end_one_by_one(first: Rank, ranks: list[Rank], *, leaves: bool) -> None:
    """The same, where ranks may be in MPI's end: `first` alone, with which the launcher ends the others.

    Open MPI's prterun 5.0.11 waits for ever, at times, when ranks that wait in MPI_Finalize and those they wait for end together.
    """
    _leave([first], leaves)
    first.signal(KILL)
    _wait(ranks)
    end_ranks(ranks, leaves=leaves)


def _leave(ranks: list[Rank], leaves: bool) -> None:
    for rank in ranks:
        rank.signal(LEAVE_SIGNAL) if leaves else rank.say(LEAVE)
        rank.signal(CONTINUE)
    _wait(ranks)


def _wait(ranks: list[Rank]) -> None:
    """For the end of all, for a while."""
    limit = time.monotonic() + ANSWER_S
    while any(rank.state for rank in ranks) and time.monotonic() < limit:
        time.sleep(0.01)


def end_unconnected(first: int, ranks: list[int], launcher: int, *, leaves: bool) -> None:
    """End the `ranks` of this node that MPI's start has not connected, all with the exit code of a stall where they can, and
    the launcher. It ends the others together with the `first` one, but with ULFM it does not."""
    started = stat(launcher)[BORN]
    number = LEAVE_SIGNAL if leaves else KILL
    send([first], number)
    if _lasts(launcher, started, ANSWER_S):
        send(ranks, number)
        if _lasts(launcher, started, ANSWER_S):
            send(ranks, KILL)                                 # one that is stopped
    end_launcher(launcher, LAUNCHER_S)


def send(processes: list[int], number: int) -> None:
    for process in processes:
        with ignoring(OSError):                               # it has ended
            os.kill(process, number)


def end_launcher(launcher: int, seconds: float) -> None:
    """Kill Open MPI's mpirun, or its daemon on another host, if it does not end by itself within `seconds`.

    With the network down, the two wait for each other for minutes; two SIGTERM or two SIGINT did not end them (5.0.11).
    """
    with ignoring(OSError), open(f"/proc/{launcher}/comm") as file:
        known, born = file.read().strip() in LAUNCHERS, stat(launcher)[BORN]
        if known and _lasts(launcher, born, seconds):
            os.kill(launcher, KILL)


def _lasts(process: int, born: str, seconds: float) -> bool:
    """Whether the process is still there after so long; it returns as soon as it is not."""
    limit = time.monotonic() + seconds
    while stat(process)[BORN] == born and time.monotonic() < limit:
        time.sleep(0.01)
    return stat(process)[BORN] == born
