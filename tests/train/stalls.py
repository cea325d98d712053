"""``python stalls.py KIND PHASE RANK [train's arguments]``: the command line, with a rank that fails in a phase of step 5.

The phases are those of the watcher. KIND is one of KINDS, or "none" for the control run. "failed at SECONDS" on stdout is when it
happened (time.monotonic). Used by test_stalls.py.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.comm.watch.unwatched import NOBODY

KIND, PHASE, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
STEP = 4


def stop() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)        # of the process, another thread might take it later


def hold_the_interpreter() -> None:
    while True:                                       # a signal ends one sleep
        ctypes.PyDLL(None).sleep(1000)


def loop() -> None:
    while True:
        pass


def call_mpi() -> None:
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()


def read_for_ever() -> None:
    os.read(os.pipe()[0], 1)


def fail() -> None:
    raise ValueError("on purpose")


KINDS: dict[str, Callable[[], None]] = {
    "stop": stop, "hold": hold_the_interpreter, "loop": loop, "mpi": call_mpi, "read": read_for_ever, "none": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort, "exit": lambda: ctypes.CDLL(None).exit(85), "leave": lambda: os._exit(0), "exception": fail,
    "lingers": lambda: print(atexit.register(time.sleep, 100)), "slow": lambda: time.sleep(0.02),
    "timer": lambda: print("timer", *signal.getitimer(signal.ITIMER_REAL), flush=True)}
done = threading.Event()


def happen() -> None:
    """The fault, once in the process; a slow rank is slow again and again."""
    if launched_rank()[0] == RANK and (KIND == "slow" or not done.is_set()):
        done.set()
        while KIND != "slow" and PHASE == "load" and process.pulse is not NOBODY and process.pulse.where().get("phase") != "load":
            time.sleep(0.001)                         # batches are read ahead, and the rank comes to wait for this one
        print("failed at", time.monotonic(), flush=True)
        KINDS[KIND]()


def before(thing: Any, name: str, due: Callable[..., bool] = lambda *arguments: True) -> None:
    """The fault happens before `thing.name` runs, where the call is due."""
    old = getattr(thing, name)

    def faulty(*arguments: Any, **keys: Any) -> Any:
        if due(*arguments):
            happen()
        return old(*arguments, **keys)
    setattr(thing, name, faulty)


def arm() -> None:
    """Late imports: a rank may be stopped before them."""
    from mpitrain.checkpoint.saver import Saver
    from mpitrain.data.loader import SampleReader
    from mpitrain.parallel.gradients.reducer import GradientReducer
    from mpitrain.parallel.pipeline import runner
    from mpitrain.run.run import Run
    from mpitrain.train.evaluate import Evaluator
    from mpitrain.train.trainer import Trainer
    calls = itertools.count()

    def later(*arguments: Any) -> bool:
        return next(calls) >= STEP
    if PHASE == "mpi":
        before(Run, "of_job")
    elif PHASE == "start":
        before(Run, "_build")
    elif PHASE == "load":
        before(SampleReader, "read", later)
    elif PHASE == "forward":
        before(runner.Pipeline, "forward", later)
    elif PHASE == "backward":
        before(runner, "run_backward", later)
    elif PHASE == "exchange":
        before(GradientReducer, "finish", later)
    elif PHASE == "update":
        from mpitrain.parallel.policies.policy import Policy
        before(Policy, "own_gradients", later)
    elif PHASE == "evaluation":
        before(Evaluator, "run")                      # some ranks have no rows there
    elif PHASE == "save":
        before(Saver, "start")
    elif PHASE == "finish":
        old = Trainer._finish

        def finish(self: Trainer) -> None:
            old(self)
            happen()
        Trainer._finish = finish                      # type: ignore[method-assign]
    else:
        raise ValueError(PHASE)


def main() -> int:
    from mpitrain.cli import main as command_line
    arm()
    return command_line(["train", *sys.argv[4:]], process)


if __name__ == "__main__":
    process = Process()
    process.run(main)
