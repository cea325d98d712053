"""Programs that fail in one way each, for test_guard.py: ``python faults.py NAME RANK`` fails on rank RANK (-1: on all)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.comm.job import guard
from mpitrain.comm.job.start import launched_rank, start
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError, DataError, Stopped

NAME, CULPRIT = sys.argv[1], int(sys.argv[2])
KEPT: list[object] = []
PROCESS = guard.Process(traceback="--traceback" in sys.argv)
CHOSEN = CULPRIT in (-1, launched_rank()[0])


def open_channel() -> Channel:
    return Channel(start().comm.Dup(), "test")


def wait_for_ever(channel: Channel) -> None:
    while True:
        channel.allreduce(np.ones(1000), name="endless")


def fail_in_a_loop(action: Any) -> int:
    """All ranks exchange for a while; then the chosen ones do `action`, and the others wait in their next collective."""
    channel = open_channel()
    for step in range(20):
        channel.allreduce(np.ones(1000), name="gradient")
        if step == 10 and CHOSEN:
            action(channel)
    wait_for_ever(channel)
    return 0


def throw(error: BaseException) -> None:
    raise error


def data_error(channel: Channel) -> None:
    raise DataError("label 12 is not below 10", file="dig\u00edts.h5", dataset="y", row=7, step=11)


def in_thread(channel: Channel) -> None:
    threading.Thread(target=throw, args=(ValueError("from a thread"),)).start()       # the main thread goes on exchanging


def kill(channel: Channel) -> None:
    print(f"failed at {time.monotonic()}\n", end="", flush=True)      # one write: ranks' lines do not mix
    os.kill(os.getpid(), signal.SIGKILL)


def swapped(channel: Channel) -> None:
    first, second = np.ones(1000), np.ones(1000)
    works = [channel.start_allreduce(second, "bucket 1"), channel.start_allreduce(first, "bucket 0")]
    for work in works:
        work.wait()
    assert (first == start().size).all()


def swapped_in_thread(channel: Channel) -> None:
    """The same, seen by the thread that moves messages while the main thread is busy with something else."""
    thread = channel.progress.thread()
    with thread.lock:
        works = [channel.start_allreduce(np.ones(1000), name) for name in ("bucket 1", "bucket 0")]
    for work in works:
        thread.hand_over(work)
    threading.Event().wait()


def in_order(channel: Channel) -> None:
    first, second = np.ones(1000), np.ones(1000)
    works = [channel.start_allreduce(first, "bucket 0"), channel.start_allreduce(second, "bucket 1")]
    for work in works:
        work.wait()
    print("a wrong value was used", flush=True)


def desync(wrong: Any, right: Any) -> int:
    channel = open_channel()
    channel.barrier()
    (wrong if CHOSEN else right)(channel)
    wait_for_ever(channel)
    return 0


def before_mpi() -> int:
    if CHOSEN:
        raise DataError("found before MPI started")
    return fail_in_a_loop(lambda channel: None)


def wrong_config() -> int:
    with guard.symmetric():
        if CHOSEN:
            raise ConfigError("optimizer.lr=-1 must be positive")
    return fail_in_a_loop(lambda channel: None)


def wrong_config_after_start() -> int:
    open_channel()
    return wrong_config()


def in_barrier() -> int:
    channel = open_channel()
    if CHOSEN:
        raise RuntimeError("line one\nmpitrain: not a second line \x1b[31m")
    channel.barrier()
    return 0


def with_run_folder() -> int:
    with PROCESS.recording(Path(os.environ["RUN_FOLDER"])):
        return in_barrier()


def disk_full() -> int:
    """The disk is full for the run and for its record too: RUN_FOLDER is no folder."""
    with PROCESS.recording(Path(os.environ["RUN_FOLDER"])):
        return fail_in_a_loop(lambda channel: throw(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")))


def stuck_abort() -> int:
    """Even when MPI_Abort hangs the process must end."""
    guard.abort = lambda code: threading.Event().wait()       # type: ignore[assignment]
    return in_barrier()


def together() -> int:
    """All ranks fail at once, and no abort comes in time to keep the others from printing."""
    def late_abort(exit_code: int) -> None:
        time.sleep(1)
        abort(exit_code)
    abort, guard.abort = guard.abort, late_abort              # type: ignore[assignment]
    channel = open_channel()
    channel.barrier()
    raise RuntimeError("on every rank")


def no_files() -> int:
    """Every file descriptor is in use when this rank fails."""
    def leak(channel: Channel) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = []
        while True:
            kept.append(os.open(os.devnull, os.O_RDONLY))
    return fail_in_a_loop(leak)


def no_memory() -> int:
    """Memory runs out one small object at a time, and what holds it is still there when the failure is handled."""
    def leak(channel: Channel) -> None:
        print(f"failed at {time.monotonic()}\n", end="", flush=True)      # there is no memory to say so later
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, ((pages * resource.getpagesize()) + (8 << 20),) * 2)
        while True:
            KEPT.append(object())
    return fail_in_a_loop(leak)


def no_threads() -> int:
    def fail_without(channel: Channel) -> None:
        threading.Thread.start = lambda thread: throw(RuntimeError("can't start new thread"))       # type: ignore[method-assign]
        raise ValueError("no thread left")
    return fail_in_a_loop(fail_without)


def no_text() -> int:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not today")
    return fail_in_a_loop(lambda channel: throw(Unprintable()))


def nothing_left() -> int:
    """The failure cannot even be described."""
    guard.describe = lambda *arguments: throw(RuntimeError("no"))  # type: ignore[assignment, return-value]
    return fail_in_a_loop(lambda channel: throw(ValueError("first")))


def lone_survivor() -> int:
    """A call of MPI itself, not of ours, learns that the other rank is dead."""
    comm = start().comm
    comm.Barrier()
    if CHOSEN:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.Barrier()


def closed_stderr() -> int:
    channel = open_channel()
    channel.barrier()
    if CHOSEN:
        os.close(2)
        raise RuntimeError("nobody can read this")
    wait_for_ever(channel)
    return 0


def sleep() -> int:
    channel = open_channel()
    channel.barrier()
    print("ready", flush=True)
    wait_for_ever(channel)
    return 0


def fine() -> int:
    channel = open_channel()
    channel.barrier()
    channel.close()
    return 0


def reduce(array: Any) -> Any:
    return lambda channel: channel.allreduce(array, name="x")


FAULTS: dict[str, Any] = {
    "fine": fine, "sleep": sleep, "before_mpi": before_mpi, "wrong_config": wrong_config, "in_barrier": in_barrier,
    "wrong_config_after_start": wrong_config_after_start, "with_run_folder": with_run_folder, "stuck_abort": stuck_abort,
    "disk_full": disk_full,
    "closed_stderr": closed_stderr, "together": together, "no_files": no_files, "no_memory": no_memory, "no_threads": no_threads,
    "no_text": no_text, "nothing_left": nothing_left, "lone_survivor": lone_survivor,
    "data": lambda: fail_in_a_loop(data_error),
    "bug": lambda: fail_in_a_loop(lambda channel: throw(ZeroDivisionError("division by zero"))),
    "memory": lambda: fail_in_a_loop(lambda channel: np.empty(1 << 60, np.uint8)),
    "missing": lambda: fail_in_a_loop(lambda channel: Path("/nonexistent/x.h5").read_bytes()),
    "interrupt": lambda: fail_in_a_loop(lambda channel: throw(KeyboardInterrupt())),
    "stopped": lambda: fail_in_a_loop(lambda channel: throw(Stopped("saved at step 10; start again with --resume"))),
    "exit": lambda: fail_in_a_loop(lambda channel: sys.exit(85)),
    "exit_0": lambda: fail_in_a_loop(lambda channel: sys.exit(0)),
    "exit_text": lambda: fail_in_a_loop(lambda channel: sys.exit("enough")),
    "thread": lambda: fail_in_a_loop(in_thread),
    "kill": lambda: fail_in_a_loop(kill),
    "return_3": lambda: 3 if CHOSEN else fail_in_a_loop(lambda channel: None),
    "swapped": lambda: desync(swapped, in_order),
    "swapped_in_thread": lambda: desync(swapped_in_thread, in_order),
    "dtype": lambda: desync(reduce(np.ones(8)), reduce(np.ones(8, np.int64))),
    "count": lambda: desync(reduce(np.ones(9)), reduce(np.ones(8))),
    "skipped": lambda: desync(lambda channel: None, reduce(np.ones(8))),
    "extra_barrier": lambda: desync(Channel.barrier, lambda channel: None),
    "other_operation": lambda: desync(lambda channel: channel.broadcast(np.ones(8), name="x"), reduce(np.ones(8))),
    "large_against_small": lambda: desync(reduce(np.ones(10**6)), reduce(np.ones(1))),
}


def timed_fail(error: BaseException) -> None:
    """Tell the test when the failure began: starting Python and MPI takes its own time on a busy machine."""
    if not KEPT:
        print(f"failed at {time.monotonic()}\n", end="", flush=True)      # one write: ranks' lines do not mix
    fail(error)


fail, PROCESS.fail = PROCESS.fail, timed_fail                 # type: ignore[method-assign]

if __name__ == "__main__":
    PROCESS.run(FAULTS[NAME])
