"""Ends the whole job when one rank fails: one line on stderr, one exit code, within seconds, and never a hang.

Without it a Python exception on one rank leaves the other ranks waiting in their next collective for ever. `Process.run` wraps
the program, `Process.guarding` a run in one; every exception in any thread comes to `Process.fail`:

    traceback -> errors/rank-R.json (or the terminal)  ->  may this rank print?  ->  the line  ->  MPI_Abort(exit code)

Memory, files or threads may have run out, and ended the rank; then each of these steps does without.
Several ranks often fail at once. An error that all ranks raise alike (a wrong configuration) is raised under `symmetric()`:
rank 0 prints it, the others wait for the end that rank 0 brings. Ranks of one node that fail by accident together settle it by
a file that one of them makes in the launcher's own folder of the job, or, where there is none, by a socket name that only one
process can hold. That name is free again when the process has ended, so its holder waits a moment before it prints: a rank
that comes later is ended by the first one's abort meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.comm.job import streams, turn
from mpitrain.comm.job.failure import Failure, as_peer_error, describe, printable, write_record
from mpitrain.comm.job.signals import StopRequest, interrupt_once, launched_by_hydra, on_terminate
from mpitrain.comm.job.start import abort, finalize_within, launched_by_mpirun, launched_rank, local_rank, started
from mpitrain.comm.messages.lost_peer import is_lost
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.errors import DesyncError, LostFolderError, PeerError, Stopped, print_warning

# Seconds. A failed job ends within 5 in all cases, so the waits must fit below that one after the other.
WAIT_FOR_RANK_0 = 1.5         # the other ranks wait so after a symmetric error; Abort took 0.2 s to end 3 ranks
WAIT_FOR_FIRST_NODE = 1.0     # other nodes wait so after an error that several nodes see together
HOLD = 0.3                    # the pause between the claim and the line; a rank was ended 0.01 to 0.1 s after another one's Abort
LIMIT = 4.0                   # the process ends after this, whatever MPI does
LAUNCHER = os.getppid()
RESERVE = 2 << 20             # bytes kept for a failure, when memory may have run out


@contextlib.contextmanager
def symmetric() -> Iterator[None]:
    """Errors raised inside happen on every rank alike, so one rank prints them.

    A promise that may be broken: if only one rank raises, it prints after a moment, and the job still ends within 5 seconds.
    """
    try:
        yield
    except Exception as error:
        error.mpitrain_symmetric = True                       # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports without the search for garbage: 80 collections found none, in 14 of a start's 300 ms. Later ones pass over what
    is there now."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()


def is_symmetric(error: BaseException) -> bool:
    """Whether an error happens on every rank alike; a stopped run ends so."""
    return bool(getattr(error, "mpitrain_symmetric", isinstance(error, Stopped)))


def is_unconnected(error: BaseException) -> bool:
    """Whether MPI knows nothing of the other processes of the launcher, so that each of them has to end by itself."""
    return bool(getattr(error, "mpitrain_unconnected", False))


class Process:
    """The single state of this process: its end, the signal to stop, the folders that tracebacks go to.

    A program makes one and runs its main function with it; code in there gets it as an argument. `traceback` prints
    tracebacks on the terminal rather than into a run folder.
    """

    def __init__(self, *, traceback: bool = False, stop: StopRequest | None = None):
        self.traceback, self.stop = traceback, stop or StopRequest()
        self.runs = False                                     # whether `run` runs the program, which ends with its main function
        self.goes_on = self.went_on = False                   # whether a run goes on where another rank is lost; whether one did
        self.limits: Any = None                               # of this host, which a guardian holds (run.limits)
        self.pulse: Unwatched = NOBODY                        # by which a watcher sees whether this rank moves
        self.tells_others: Callable[[], None] | None = None   # where mpirun lets them wait for a rank that has ended
        self._folders: list[Path] = []
        self._failing = threading.Lock()
        self._reserve: bytearray | None = bytearray(RESERVE)

    def run(self, main: Callable[[], int]) -> NoReturn:
        """Runs the program and exits with the code it returns; a failure of any thread on any rank ends the job with its code."""
        threading.excepthook, self.runs = self._thread_failed, True
        interrupt_once(LIMIT / 2, lambda: self.fail(KeyboardInterrupt()))
        try:
            code = main()
        except BaseException as error:
            if isinstance(error, BrokenPipeError) and _is_alone() and not streams.finish():
                self.pulse.over()
                sys.exit(streams.GONE)                        # whoever read our output has seen enough
            if isinstance(error, SystemExit) and started() is None and (_is_alone() or not error.code):
                self._write_output()
                self.pulse.over()
                raise                                         # --help and the like: nobody waits for this rank
            self.fail(error)
        if code != 0 and not _is_alone():
            self.fail(SystemExit(code))
        self.put_back()
        self.pulse.finish()
        self.pulse.over()
        self._write_output()
        if self.went_on:
            finalize_within(LIMIT / 2, code)
        sys.exit(code)

    def put_back(self) -> None:
        """Ends the limits of this host, if runs of this process have set any; what could not be put back is told."""
        limits, self.limits = self.limits, None
        for line in limits.undo() if limits is not None else ():
            print_warning(line)

    def _write_output(self) -> None:
        try:
            streams.finish()
        except OSError as error:                              # a full disk
            self.fail(error)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """What this rank meets by itself inside ends the job, also where nothing else guards the program."""
        before, threading.excepthook = threading.excepthook, self._thread_failed
        try:
            yield
        except BaseException as error:
            if not is_symmetric(error):
                self.fail(error)
            raise
        finally:
            threading.excepthook = before

    @contextlib.contextmanager
    def recording(self, folder: Path) -> Iterator[None]:
        """A failure inside, in any thread, leaves its traceback in ``errors/rank-R.json`` of this folder."""
        self._folders.append(folder)
        try:
            yield
        except BaseException as error:
            error.mpitrain_folder = folder                    # type: ignore[attr-defined]
            raise
        finally:
            self._folders.remove(folder)

    def on_terminate(self, error: Callable[[], BaseException]) -> None:
        """From now on SIGTERM asks a program that listens for signals to save and stop, where the launcher waits for that.

        A program that is alone ends with this error. Open MPI's mpirun shows nothing that ranks say after the signal, and sends
        it also where another rank has failed, which has said why.
        """
        if not self.stop.listens or threading.current_thread() is not threading.main_thread():
            return
        if launched_by_hydra():
            self.stop.listen(signal.SIGTERM)
        elif _is_alone():
            on_terminate(lambda: self.fail(error()))

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this process, and with it the job. Called once per process; a second failing thread waits for the first."""
        if not self._failing.acquire(blocking=False):
            time.sleep(LIMIT + 1)                             # the first failing thread ends the process before
            os._exit(70)
        self._reserve = None
        self.pulse.over()
        signal.setitimer(signal.ITIMER_REAL, LIMIT + 1)       # needs no thread, file or memory; the signal ends the process
        exit_code, (rank, size) = 70, _place()
        newline = "\n" if size > 1 else ""                    # the launcher's own text may have left a line open
        folder = getattr(error, "mpitrain_folder", self._folders[-1] if self._folders else None)
        try:
            error = as_peer_error(error) or error
            failure = describe(error, {} if is_symmetric(error) else self.pulse.where())
            exit_code = failure.exit_code
            _bound(exit_code)
            self._record(failure, None if isinstance(error, LostFolderError) else folder, rank, size)
            if size > 1:
                _wait_for_turn(error, rank, exit_code, self._tell_others)
            _print(newline + failure.line(rank, size))
        except BaseException as another:                      # reporting itself failed; the other ranks must not wait for it
            _print(f"{newline}mpitrain: E_BUG rank={rank}/{size}: {type(error).__name__}, and then {type(another).__name__} "
                   "while saying so")
        self._tell_others()
        if is_unconnected(error):
            os._exit(exit_code)                               # MPI_Abort would add its own text, and end nobody else
        _end(exit_code, size)

    def _tell_others(self) -> None:
        if self.tells_others is not None and turn.leaves_ranks_out():
            with contextlib.suppress(BaseException):
                self.tells_others()

    def _thread_failed(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value or arguments.exc_type()
        if isinstance(error, SystemExit) or (self.goes_on and is_lost(error)):
            return                                            # sys.exit in a thread ends that thread, by Python's rule; of a
        self.fail(error)                                      # lost rank the main thread learns by itself

    def _record(self, failure: Failure, folder: Path | None, rank: int, size: int) -> None:
        to_terminal = self.traceback
        if folder is not None and not self.traceback:
            try:
                write_record(folder, failure, rank, size)
            except OSError:                                   # a full disk is often why we are here, and the line says so;
                to_terminal = failure.code in ("E_BUG", "E_USER")      # nobody finds a bug without its traceback
        if to_terminal:
            for line in failure.traceback.splitlines():
                _print("| " + printable(line))                # a traceback's line may not start like the one line


def _place() -> tuple[int, int]:
    world = started()
    return (world.rank, world.size) if world else launched_rank()


def _is_alone() -> bool:
    return _place()[1] == 1


def _bound(exit_code: int) -> None:
    """Set two alarms against a hang from now on: one keeps the exit code, the other works with the GIL held (and exits 1)."""
    def end() -> None:
        time.sleep(LIMIT)
        os._exit(exit_code)
    with contextlib.suppress(RuntimeError, MemoryError):      # threads may have run out
        threading.Thread(target=end, daemon=True).start()
    with contextlib.suppress(OSError, RuntimeError), open(os.devnull, "w") as nowhere:      # so may files
        faulthandler.dump_traceback_later(LIMIT + 0.5, exit=True, file=os.dup(nowhere.fileno()))


def _wait_for_turn(error: BaseException, rank: int, exit_code: int, tell_others: Callable[[], None]) -> None:
    """Return on the rank that prints. The others are ended by its abort while they wait here, or end themselves."""
    if is_symmetric(error):
        if rank:
            _wait_while_launched(WAIT_FOR_RANK_0)
            if is_unconnected(error):                         # rank 0 prints, and cannot end this process
                os._exit(exit_code)
    elif isinstance(error, (DesyncError, PeerError)) and rank != local_rank():
        time.sleep(WAIT_FOR_FIRST_NODE)
    if not turn.claim(exit_code):
        tell_others()
        _wait_while_launched(2 * HOLD if turn.leaves_ranks_out() else LIMIT - WAIT_FOR_RANK_0)      # ULFM: nobody ends this one
        os._exit(turn.claimed_code(exit_code))
    time.sleep(HOLD)


def _wait_while_launched(seconds: float) -> None:
    """Returns early when the launcher has ended, as it does with ULFM before its ranks."""
    end = time.monotonic() + seconds
    while os.getppid() == LAUNCHER and time.monotonic() < end:
        time.sleep(0.01)


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):            # stdout or stderr closed: nobody reads, and we must still end
        streams.finish()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(2, line.encode() + b"\n")                    # one write a line: lines of ranks do not mix


def _end(exit_code: int, size: int) -> NoReturn:
    if size == 1 and threading.current_thread() is threading.main_thread():
        atexit._run_exitfuncs()                               # a program's own
        if started():
            finalize_within(LIMIT / 2, exit_code)             # a process alone has files of MPI's to remove
        os._exit(exit_code)                                   # Python's end waits for ever if a reader is inside HDF5
    # With ULFM three of four ranks heard nothing of an MPI_Abort and waited on, and mpirun exits with 0 where the last rank alive
    # aborts (Open MPI 5.0.11). It takes the exit code of a process that just ends.
    with contextlib.suppress(BaseException):
        if size > 1 and (started() and not turn.leaves_ranks_out() or not launched_by_mpirun()):
            abort(exit_code)                                  # srun and others go on without a rank unless MPI tells them
    os._exit(exit_code)                                       # before MPI_Init, mpirun ends the job for a non-zero exit
