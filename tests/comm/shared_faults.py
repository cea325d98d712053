"""Programs whose shared memory loses a rank, for test_shared.py: ``python shared_faults.py NAME RANK``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from mpitrain.comm.job import guard
from mpitrain.comm.job.start import launched_rank, start
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared import channel as shared_module
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.engine import ARRIVED, QUEUED
from mpitrain.comm.shared.node import Node
from mpitrain.comm.shared.queue import LOOK

NAME, CULPRIT = sys.argv[1], int(sys.argv[2])
CHOSEN = launched_rank()[0] == CULPRIT


def open_channel() -> tuple[SharedChannel, Any]:
    progress = Progress()
    node = Node(start().comm.Dup(), progress)
    channel = SharedChannel(Channel(start().comm.Dup(), "test", progress=progress), node)
    assert channel.shared, channel.notes
    return channel, channel.allocate(1 << 20).view(np.float32)


def exchange(channel: SharedChannel, array: Any, times: int | None = None) -> None:
    while times is None or times:
        channel.allreduce(array, name="gradient")
        times = times and times - 1


def die() -> None:
    print(f"failed at {time.monotonic()}\n", end="", flush=True)      # one write: ranks' lines do not mix
    os.kill(os.getpid(), signal.SIGKILL)


def killed() -> int:
    channel, array = open_channel()
    exchange(channel, array, 20)
    if CHOSEN:
        die()
    exchange(channel, array)
    return 0


def killed_inside() -> int:
    """Between its arrival and its part of the sum."""
    channel, array = open_channel()
    exchange(channel, array, 20)
    if CHOSEN:
        plan = channel.prepare(array, "gradient")._plan       # type: ignore[attr-defined]
        assert channel._engine.advance(plan, array, channel._turn.sequence, QUEUED, 0, -1) == ARRIVED
        die()
    exchange(channel, array)
    return 0


def killed_beside_messages() -> int:
    """While messages are in flight too, so that the others poll instead of sleeping."""
    channel, array = open_channel()
    exchange(channel, array, 20)
    if CHOSEN:
        die()
    elsewhere = np.ones(1 << 18, np.float32)
    channel.start_allreduce(elsewhere, "elsewhere")
    exchange(channel, array)
    return 0


def raises() -> int:
    channel, array = open_channel()
    exchange(channel, array, 20)
    if CHOSEN:
        raise RuntimeError("on one rank")
    exchange(channel, array)
    return 0


def stopped() -> int:
    """A rank that is only slow is waited for."""
    channel, array = open_channel()
    array[...] = 1
    exchange(channel, array, 2)
    if CHOSEN:
        pid = os.getpid()
        if os.fork() == 0:                                    # a child holds no lock of ours, and letting go of it frees none
            time.sleep(6 * LOOK)                              # in which the others look six times whether it lives
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        os.wait()
    exchange(channel, array, 2)
    assert (array == start().size ** 4).all()
    channel.close()
    channel.node.close()
    return 0


def interrupted() -> int:
    """A signal reaches a rank that sleeps in C."""
    channel, array = open_channel()
    exchange(channel, array, 2)
    if CHOSEN:
        signal.signal(signal.SIGALRM, lambda *_: PROCESS.fail(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        exchange(channel, array)
    while True:
        signal.pause()


def swapped() -> int:
    channel, array = open_channel()
    names = ["bucket 0", "bucket 1"]
    half = array.size // 2
    parts = {"bucket 0": array[:half], "bucket 1": array[half:]}
    for name in reversed(names) if CHOSEN else names:
        channel.start_allreduce(parts[name], name)
    exchange(channel, array)
    return 0


PROGRAMS = {"killed": killed, "killed_inside": killed_inside, "killed_beside_messages": killed_beside_messages,
            "raises": raises, "stopped": stopped, "interrupted": interrupted, "swapped": swapped}


def timed_fail(error: BaseException) -> None:
    print(f"failed at {time.monotonic()}\n", end="", flush=True)      # one write: ranks' lines do not mix
    fail(error)


PROCESS = guard.Process()
fail, PROCESS.fail = PROCESS.fail, timed_fail                 # type: ignore[method-assign]

if __name__ == "__main__":
    if "--polling" in sys.argv:
        shared_module.kernels = lambda: None                  # type: ignore[assignment]
    PROCESS.run(PROGRAMS[NAME])
