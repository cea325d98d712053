"""This rank's part in being watched: a record of where it is, a thread that answers, stacks on a signal, the watcher's place.

    span begins     count, step and phase go into the record: three stores into memory that the watcher reads
    thread          sleeps in a pipe until the watcher asks: does the main thread wait for others, and in which collective?
                    It writes the stacks of all threads, too: a signal handler has crashed while others ran Python.
                    The watcher says now and then that it is there, or the thread sees that it is not, and starts another
    STACK_SIGNAL    Python's fault handler writes them where the interpreter's lock is held, and that thread gets no turn
    LEAVE_SIGNAL    native/leave.c ends the process with the exit code of a stall; without a compiler the thread does
    SIGALRM         native/leave.c ends a rank for which MPI does not start, where the first rank or the watcher died before

The watcher reaches all of this through /proc: nothing has a name, and nothing is left behind. The first rank of a node starts it
before MPI (`starting`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpitrain.backend import native
from mpitrain.comm.job.failure import memory_limit
from mpitrain.comm.job.start import launched_rank, local_rank
from mpitrain.comm.job.turn import claim_file
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.watch.alarm import set_alarm
from mpitrain.comm.watch.record import (
    ANSWERS,
    COUNT,
    HERE,
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
    silence,
    step_in,
)
from mpitrain.comm.watch.starting import WatcherProcess
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.comm.watch.words import write
from mpitrain.errors import StallError

COMM = str(Path(__file__).resolve().parents[1]) + os.sep          # who is in code of this folder waits for other ranks
LIBRARY = (str(Path(os.__file__).parent) + os.sep, "<frozen")
SILENCES = 2                              # the watcher is gone after so many; a rank more for each one before it on its node
BRIEF_S, REPLACEMENTS = 10.0, 3           # so many that end within this are replaced in a row
ENDING_S = 2.0                            # a launcher that ends the job may end the watcher so long before this rank
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
        with contextlib.suppress(ValueError):                 # not the main thread
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)       # so it is again at Python's end: a rank may wait there in MPI's
        faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        library = native.load("leave")
        leaves = library is not None and library.leave_on(LEAVE_SIGNAL, StallError.exit_code) == 0
        self._asked, self._ask = os.pipe()
        self._phases = {name: PHASES.index(phase) for name, phase in (ROWS | WORDS).items()}
        self._progress: Progress | None = None
        rank, size = launched_rank()
        self._watcher = WatcherProcess(seconds, start, what, rank, size, int(leaves))
        self._silence, self._turn, self._heard = silence(seconds), 0, False
        self._begun, self._brief = 0.0, 0                     # when the watcher was started; how many in a row ended soon
        self.obstacle = ""                                    # it says why there is no watcher where there should be one
        if local_rank() == 0:
            self._start_watcher()
        threading.Thread(target=self._listen, name="mpitrain-pulse", daemon=True).start()
        if library is not None:
            self._name_exits(library)
        self._stop_alarm = set_alarm(library, start) if start and what == "end" else lambda: None

    def _start_watcher(self) -> None:
        self._begun = time.monotonic()
        why = self._watcher.start()
        self.obstacle = why and f"nobody watches for ranks that stand still on {socket.gethostname()}: {why}"

    def _name_exits(self, library: Any) -> None:
        """A library in C that ends the program by `exit` (OpenBLAS without memory, Fortran's STOP) does so with our code."""
        rank, size = launched_rank()
        limit = memory_limit()
        code, number = ("E_MEMORY", 71) if limit else ("E_EXIT", 70)
        cure = f"; if it found no memory{limit}, raise that limit" if limit else "; what it has said stands above"
        text = (f"\nmpitrain: {code} rank={rank}/{size} host={socket.gethostname()}: a library in C has ended the program by "
                f"its own call of exit(){cure}\n")
        library.leave_at_exit(self._record, RECORD_BYTES, OVER, number, text.encode(), os.fsencode(claim_file()))

    def contact(self) -> list[Any]:
        """All that a watcher on this host needs to see this rank, as JSON."""
        return [socket.gethostname(), self._watcher.orders >= 0, os.getpid(), self._ask, self._record, self._stack]

    def started(self) -> None:
        """MPI has started. The program may do what it likes until it opens a run."""
        self._stop_alarm_once()
        self._watcher.order("start", "start done")

    def opens(self) -> None:
        """A run is being opened: ranks wait for each other."""
        self._watcher.order("start", "start opens")

    def recovers(self) -> None:
        """Ranks that were left look for what to go on from, or ranks that a watcher knows open another run: that may take as long
        as a start."""
        self._enter("start")

    def _stop_alarm_once(self) -> None:
        """Stops it; the timer and the signal are the program's from then on."""
        stop, self._stop_alarm = self._stop_alarm, lambda: None
        stop()

    def join(self, contacts: Sequence[list[Any] | None], own: int, progress: Progress) -> None:
        """Have this host's watcher watch the ranks on it: `contacts` are all ranks' (None: not watched), `own` is this rank."""
        self._stop_alarm_once()
        self._progress = progress
        self._enter("start")                                  # another run of this process may have come before
        host = socket.gethostname()
        known = [(rank, contact) for rank, contact in enumerate(contacts) if contact is not None]
        here = [(rank, contact) for rank, contact in known if contact[0] == host]
        others = sorted({contact[0] for _, contact in known} - {host}) or ["not watched"] * (len(known) < len(contacts))
        if any(contact[1] for rank, contact in here if rank < own):      # the launcher gave no local rank: one watcher is enough
            self._watcher.end()
        self._watcher.order("run", f"run {len(contacts)} {','.join(others)}",
                            *(f"rank {rank} {' '.join(map(str, contact[2:]))}" for rank, contact in here))
        self._turn = [rank for rank, _ in here].index(own)
        if not self._turn and not any(contact[1] for _, contact in here):        # the rank that had started it was lost
            self._start_watcher()
        self._heard |= self._watcher.orders >= 0

    def keep_in(self, folder: Path) -> None:
        """Stacks go to ``errors`` in this run folder."""
        self._watcher.order("folder", f"folder {os.fsencode(folder).hex()}")

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
        self._stop_alarm_once()
        self._words[OVER] = 1

    def leave_ends(self) -> None:
        """The watcher need not tell that a rank was lost: the others do, and go on."""
        self._watcher.order("silent", "silent")

    def rest(self) -> None:
        """The run is closed; the program may do what it likes now."""
        self._enter(REST)

    def _enter(self, phase: str) -> None:
        self._words[COUNT] += 1
        self._words[PHASE] = PHASES.index(phase)

    def _listen(self) -> None:
        """Answers the watcher. Another one is started when this rank's own has ended, or none says for long that it is there."""
        silent, before, began = 0, 0.0, time.monotonic()
        while True:
            before, began = began, time.monotonic()
            looked = select.poll()
            looked.register(self._asked, select.POLLIN)
            if self._watcher.orders >= 0:
                looked.register(self._watcher.orders, 0)      # an error, once nobody reads there
            found = dict(looked.poll(1000 * self._silence))
            silent = 0 if found else silent + 1               # counted, since a job that was stopped for long comes back to one
            if self._asked in found:
                self._heard = True
                words = os.read(self._asked, 4096)
                if words.strip(HERE):
                    self._answer(words)
            elif found:
                time.sleep(ENDING_S)
                if self._another_watches(time.monotonic() - before):
                    self._watcher.end()
                elif self._watcher.orders >= 0:               # this rank has not ended it
                    self._replace("has ended")
            elif silent >= SILENCES + self._turn and self._heard and self._words[PHASE] != PHASES.index(REST):
                silent = 0
                self._replace(f"has said nothing for {self._silence * (SILENCES + self._turn):.0f} s or more")

    def _another_watches(self, seconds: float) -> bool:
        """Whether another rank has replaced this rank's watcher, while this rank was stopped: two looks took so many seconds."""
        if seconds < SILENCES * self._silence + ENDING_S:
            return False                                      # The others have not waited for so long.
        looked = select.poll()
        looked.register(self._asked, select.POLLIN)
        return bool(looked.poll(1000 * self._silence))        # It says in this time that it is there.

    def _replace(self, why: str) -> None:
        if self._words[OVER]:
            self._watcher.end()
            return
        self._heard = False                                   # one that cannot see this rank is not replaced again
        told = self.obstacle
        self._brief = self._brief + 1 if time.monotonic() - self._begun < BRIEF_S else 0
        try:
            if self._brief > REPLACEMENTS:
                self._watcher.end()
                self.obstacle = f"nobody watches any more, since each of the last {self._brief} ended within {BRIEF_S:.0f} s"
            else:
                self._start_watcher()
        except Exception as error:                            # the job goes on without one
            self.obstacle = f"nobody watches any more: {type(error).__name__}: {error}"
        if not told:
            write(f"warning: the watcher of {socket.gethostname()} {why}: {self.obstacle or 'another one takes its place'}")

    def _answer(self, words: bytes) -> None:
        if LEAVE in words:
            os._exit(StallError.exit_code)
        if STACKS in words:
            faulthandler.dump_traceback(self._stack, all_threads=True)
        lines = ["waits" if waits(sys._current_frames().get(threading.main_thread().ident or 0)) else "", *self._in_flight()]
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
