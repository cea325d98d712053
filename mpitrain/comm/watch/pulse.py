"""This rank's part in being watched: a record of where it is, a thread that answers, stacks on a signal, the watcher's start.

    span begins     count, step and phase go into the record: three stores into memory that the watcher reads
    thread          sleeps in a pipe until the watcher asks: does the main thread wait for others, and in which collective?
                    It writes the stacks of all threads, too: a signal handler has crashed while others ran Python
    STACK_SIGNAL    Python's fault handler writes them where the interpreter's lock is held, and that thread gets no turn
    LEAVE_SIGNAL    native/leave.c ends the process with the exit code of a stall; without a compiler the thread does
    SIGALRM         native/leave.c ends a rank for which MPI does not start, where the first rank died before it had a watcher

The watcher reaches all of this through /proc: nothing has a name, and nothing is left behind. The first rank of a node starts it
before MPI, because nothing forks once MPI has started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpitrain.backend import native
from mpitrain.comm.job.start import launched_rank, local_rank
from mpitrain.comm.job.turn import claim_file
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.watch.record import (
    ANSWERS,
    COUNT,
    LEAVE,
    LEAVE_SIGNAL,
    LENGTH,
    OVER,
    PHASE,
    PHASES,
    RECORD_BYTES,
    REST,
    STACK_SIGNAL,
    STACKS,
    STEP,
    TEXT,
    step_in,
)
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.errors import StallError

COMM = str(Path(__file__).resolve().parents[1]) + os.sep          # who is in code of this folder waits for other ranks
LIBRARY = (str(Path(os.__file__).parent) + os.sep, "<frozen")
WATCHER = (f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
           "from mpitrain.comm.watch.watcher import main; main()")
BLOCKED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}     # for ranks; the watcher sees its rank end instead
ALARM_S = 5.0                                                     # a rank without a watcher waits so much longer for MPI's start
# The phase that a span begins, by its row, and on the row "compute" by the first word of its name.
ROWS = {"data": "load", "wait": "exchange", "optimizer": "update", "evaluation": "evaluation", "checkpoint": "save"}
WORDS = {"forward": "forward", "backward": "backward", "weight": "backward", "exchange": "exchange", "gradients": "exchange"}


class Pulse(Unwatched):
    """Made before MPI starts, by each rank of a job.

    `seconds` without progress (`start` of them until training begins) are a stall, and `what` is done: "end" or "warn".
    """

    def __init__(self, seconds: float, start: float, what: str):
        self._record = os.memfd_create("mpitrain-record")
        os.ftruncate(self._record, RECORD_BYTES)
        self._memory = mmap.mmap(self._record, RECORD_BYTES)
        self._words = memoryview(self._memory)[:TEXT].cast("Q")
        self._stack = os.memfd_create("mpitrain-stack")
        faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        library = native.load("leave")
        leaves = library is not None and library.leave_on(LEAVE_SIGNAL, StallError.exit_code) == 0
        self._asked, self._ask = os.pipe()
        self._phases = {name: PHASES.index(phase) for name, phase in (ROWS | WORDS).items()}
        self._progress: Progress | None = None
        threading.Thread(target=self._answer, name="mpitrain-pulse", daemon=True).start()
        self.obstacle = ""                                    # it says why there is no watcher where there should be one
        self._orders = self._start_watcher(seconds, start, what, leaves) if local_rank() == 0 else None
        self._stop_alarm = self._set_alarm(library, start) if self._orders is None and start and what == "end" else lambda: None

    def _start_watcher(self, seconds: float, start: float, what: str, leaves: bool) -> int | None:
        """The end of a pipe that gives it orders; it ends when this is closed. None where no process can be started."""
        orders, ours = os.pipe()
        rank, size = launched_rank()
        told = map(str, (seconds, start, what, rank, size, int(leaves)))
        arguments = [sys.executable, "-I", "-S", "-c", WATCHER, *told]
        try:
            os.posix_spawn(sys.executable, arguments, os.environ, setsigmask=BLOCKED, file_actions=[
                (os.POSIX_SPAWN_DUP2, orders, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
        except OSError as error:
            os.close(ours)
            self.obstacle = f"nobody watches for ranks that stand still: starting a process failed ({error.strerror})"
            return None
        finally:
            os.close(orders)
        return ours

    def _set_alarm(self, library: Any, seconds: float) -> Callable[[], object]:
        """Ends this rank, which has no watcher of its own, if MPI has not started a while after one would have said so.

        MPI's start holds the interpreter's lock, so the alarm is in C; without a compiler Python's fault handler is one, with
        stacks and exit code 1. What comes back stops it. The program's own timer is left alone.
        """
        (rank, size), late = launched_rank(), seconds + min(seconds, ALARM_S)
        if size == 1 or signal.getitimer(signal.ITIMER_REAL)[0]:
            return lambda: None
        text = (f"\nmpitrain: E_STALL rank={rank}/{size} host={socket.gethostname()} phase=start: MPI has not started for "
                f"{late:.0f} s, and nobody watches: the first rank of this node has probably ended; see that all ranks start, or "
                "raise train.start_s\n")
        if library is not None:
            library.leave_in(int(late * 1000), StallError.exit_code, text.encode(), os.fsencode(claim_file()))
            stop: Callable[[], object] = library.leave_not
            return stop
        faulthandler.dump_traceback_later(late, exit=True)
        return faulthandler.cancel_dump_traceback_later

    def contact(self) -> list[Any]:
        """All that a watcher on this host needs to see this rank, as JSON."""
        return [socket.gethostname(), self._orders is not None, os.getpid(), self._ask, self._record, self._stack]

    def join(self, contacts: Sequence[list[Any] | None], own: int, progress: Progress) -> None:
        """Have this host's watcher watch the ranks on it: `contacts` are all ranks' (None: not watched), `own` is this rank."""
        self._stop_alarm()
        self._progress = progress
        self._enter("start")                                  # another run of this process may have come before
        host = socket.gethostname()
        known = [(rank, contact) for rank, contact in enumerate(contacts) if contact is not None]
        here = [(rank, contact) for rank, contact in known if contact[0] == host]
        watching = [rank for rank, contact in here if contact[1]]
        if not watching and not self.obstacle:
            self.obstacle = f"nobody watches for ranks that stand still on {host} any more: the first rank there was lost"
        if watching[:1] == [own]:
            others = sorted({contact[0] for _, contact in known} - {host}) or ["not watched"] * (len(known) < len(contacts))
            self._order(f"run {len(contacts)} {','.join(others)}",
                        *(f"rank {rank} {' '.join(map(str, contact[2:]))}" for rank, contact in here))

    def keep_in(self, folder: Path) -> None:
        """Stacks go to ``errors`` in this run folder."""
        self._order(f"folder {os.fsencode(folder).hex()}")

    def _order(self, *lines: str) -> None:
        if self._orders is not None:
            with contextlib.suppress(OSError):                # the watcher is gone; the run needs it no more than that
                os.write(self._orders, "".join(line + "\n" for line in lines).encode())

    def step(self, number: int) -> None:
        """This rank has begun the step."""
        self._words[STEP] = number

    def where(self) -> dict[str, object]:
        """The step and phase for an error line; before the first step the phase alone, between two runs nothing."""
        step, phase = step_in(self._words), PHASES[self._words[PHASE]]
        return {} if phase == REST else {"step": step, "phase": phase} if step else {"phase": phase}

    def heard(self, row: str, name: str) -> None:
        """A span begins. Called some ten times a step, so it may take no more than 0.3 us."""
        phase = self._phases.get(row)
        if phase is None:
            if row != "compute":                              # a reading thread's
                return
            phase = self._phases.get(name.partition(" ")[0], self._words[PHASE])
        words = self._words
        words[COUNT] += 1
        words[PHASE] = phase

    def span(self, row: str, name: str) -> contextlib.AbstractContextManager[None]:
        """A span that is nothing but progress."""
        self.heard(row, name)
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Training is over; all that is left is the end of the job."""
        self._enter("finish")

    def over(self) -> None:
        """This rank ends by itself from now on; one that has ended without this was killed, or has crashed."""
        self._stop_alarm()
        self._words[OVER] = 1

    def leave_ends(self) -> None:
        """The watcher need not tell that a rank was lost: the others do, and go on."""
        self._order("silent")

    def rest(self) -> None:
        """The run is closed; the program may do what it likes now."""
        self._enter(REST)

    def _enter(self, phase: str) -> None:
        self._words[COUNT] += 1
        self._words[PHASE] = PHASES.index(phase)

    def _answer(self) -> None:
        main = threading.main_thread().ident
        while True:
            words = os.read(self._asked, 4096)
            if LEAVE in words:
                os._exit(StallError.exit_code)
            if STACKS in words:
                faulthandler.dump_traceback(self._stack, all_threads=True)
            lines = ["waits" if waits(sys._current_frames().get(main or 0)) else "", *self._in_flight()]
            text = "\n".join(lines).encode()[:RECORD_BYTES - TEXT]
            self._memory[TEXT:TEXT + len(text)] = text
            self._words[LENGTH] = len(text)
            self._words[ANSWERS] += 1

    def _in_flight(self) -> list[str]:
        """The collective that waits for others, as far as this is known: the oldest that some have not begun, else the oldest."""
        try:
            found = self._progress.in_flight() if self._progress is not None else []
        except Exception:                                     # lists change while this thread looks
            return []
        found.sort(key=lambda one: not one.peers)
        return [f'{one.what} on channel "{one.channel}"' for one in found[:1]]


def waits(frame: FrameType | None) -> bool:
    """Whether the innermost frame outside the standard library is one of comm."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY) and \
            "site-packages" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(COMM)


def pulse_of(seconds: float, start: float, what: str) -> Unwatched:
    """The pulse of this rank; NOBODY where no one is to watch (`seconds` is 0), or where there is no /proc to look through."""
    return Pulse(seconds, start, what) if seconds and sys.platform.startswith("linux") else NOBODY
