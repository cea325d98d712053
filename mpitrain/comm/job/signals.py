"""SIGUSR1 asks a run to save and stop: batch systems send it ahead of the time limit, and launchers forward it to all ranks.
So does SIGTERM, under launchers that do not kill ranks after it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType


class StopRequest:
    """`asked` becomes True when a signal that is listened for has arrived on this rank; nothing else happens.

    Signals reach ranks at different times, perhaps only one of them: the ranks decide together, by adding up `asked` with
    something they all-reduce at each step anyway. The main thread calls `listen`.
    """

    def __init__(self) -> None:
        self.asked = self.listens = False

    def listen(self, number: int = signal.SIGUSR1) -> None:
        """Catch the signal from now on; call this before heavy imports, or a signal while they run ends the program.

        Whoever starts the program may block the signal until then (`env --block-signal=USR1`); one that waits arrives now.
        """
        signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        self.listens = True

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def launched_by_hydra(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the mpiexec of MPICH or Intel MPI started us. It passes SIGTERM on and waits: MPICH 4.1 to 5.0 and Intel MPI
    2021.18 killed no rank within 40 s. Where a rank fails it sends SIGKILL to the others, so SIGTERM is somebody's wish."""
    slurm = "SLURM_STEP_NUM_TASKS" in environment and "HYDI_CONTROL_FD" not in environment
    return "PMI_SIZE" in environment and "OMPI_COMM_WORLD_SIZE" not in environment and not slurm


def on_terminate(action: Callable[[], object]) -> None:
    """Calls `action` when SIGTERM arrives, from a thread of its own; the main thread calls this.

    A handler in Python would run between two instructions of the main thread, which may be in C for longer than whoever sent the
    signal lets the process live. The number of the signal, however, is written to a pipe at once.
    """
    import threading
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def wait() -> None:
        while number := os.read(ours, 1):
            if number[0] == signal.SIGTERM:
                action()
    threading.Thread(target=wait, name="mpitrain-terminate", daemon=True).start()
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def interrupt_once(after: float, end: Callable[[], object]) -> None:
    """SIGINT raises KeyboardInterrupt once; `end` is called `after` seconds later, from a thread, if the program still runs.

    A second one would interrupt the end that the first began; and Python drops what is raised in a destructor or a callback.
    A signal that is ignored, or caught by the program's own handler, stays so. The main thread calls this.
    """
    import threading

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: None)
        timer = threading.Timer(after, end)
        timer.daemon = True
        with contextlib.suppress(RuntimeError, MemoryError):      # threads may have run out
            timer.start()
        raise KeyboardInterrupt
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def ignore() -> None:
    """Ignore the signal in a program with nothing to save: it would end it, and only says that time is running out."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
