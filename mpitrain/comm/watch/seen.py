"""A rank as another process of its node sees it: its record in shared memory (`record`), and what /proc says of it.

This file is for the watcher too, which imports little and runs on the standard library alone.
"""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.memory import Memory
from mpitrain.comm.watch.record import ANSWERS, COUNT, LENGTH, OVER, PHASE, PHASES, TEXT, step_in

FILES = ("start", "save", "finish")       # phases in which a rank may read or write files for long; bytes are progress then
FILE_BYTES = 1 << 16                      # so many of them
ANSWER_S = 1.0                            # a rank that can run Python at all answers within this
STOP, CONTINUE, KILL = 19, 18, 9
STOPPED = ("T", "t")                      # states of proc(5): by a signal, by a debugger
PARENT, BORN = 1, 19                      # fields of `stat`, of which the state is the first
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Rank:
    """A rank of this node, whose descriptors are opened through /proc; `since` is when it last moved (`time.monotonic`)."""

    def __init__(self, number: int, pid: int, pipe: int, record: int, stack: int):
        self.number, self.pid, self.born = number, pid, stat(pid)[BORN]
        files = f"/proc/{pid}/fd"
        self.pipe = os.open(f"{files}/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
        self.record, self.stack = os.open(f"{files}/{record}", os.O_RDONLY), os.open(f"{files}/{stack}", os.O_RDONLY)
        self.since, self.words, self.bytes = time.monotonic(), self._read(), 0
        self.held_up = False                                 # whether other ranks wait for it, as far as the watcher has seen
        self.told = -1                                       # the count at which its stall was told
        self.memory, self.ended = Memory(pid), False         # whether the watcher has seen its end
        self.end = -1                                        # it can be read when the process has ended
        with ignoring(OSError, AttributeError):              # a kernel before 5.3: the next look sees it
            self.end = os.pidfd_open(pid)

    def close(self) -> None:
        for file in (self.pipe, self.record, self.stack, *([self.end] if self.end >= 0 else [])):
            os.close(file)

    def _read(self) -> list[int]:
        return memoryview(os.pread(self.record, TEXT, 0)).cast("Q").tolist()

    @property
    def step(self) -> int:
        return step_in(self.words)

    @property
    def phase(self) -> str:
        return PHASES[self.words[PHASE]]

    @property
    def state(self) -> str:
        """The letter of proc(5), "" if the process has ended."""
        now = stat(self.pid)
        return now[0] if now[BORN] == self.born and now[0] not in "ZX" else ""

    def has_ended(self) -> bool:
        """Whether it has ended since the last call; otherwise its memory is looked at."""
        if self.ended:
            return False
        self.ended = not self.state
        if not self.ended:
            self.memory.look()
        return self.ended

    @property
    def over(self) -> bool:
        """Whether it ends, or has ended, by itself, and says why where there is something to say; the record outlives it."""
        return self._read()[OVER] != 0

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED

    def moved(self) -> bool:
        """Whether it has moved since the last look."""
        words, self.words = self.words, self._read()
        if words[COUNT] != self.words[COUNT]:
            return True
        if self.phase not in FILES:
            return False
        before, now = self.bytes, transferred(self.pid)
        if now - before >= FILE_BYTES:
            self.bytes = now
        return now - before >= FILE_BYTES

    def say(self, word: bytes) -> None:
        with ignoring(OSError):                              # it has ended, or has not read for long
            os.write(self.pipe, word)

    def signal(self, number: int) -> None:
        with ignoring(OSError):
            if self.state:
                os.kill(self.pid, number)

    def answers(self) -> int:
        """How many it has given so far."""
        return self._read()[ANSWERS]

    def answer(self) -> list[str]:
        """The lines of its last answer: "waits" or "", then the collective that it waits in, if it is in one."""
        return os.pread(self.record, self._read()[LENGTH], TEXT).decode(errors="replace").split("\n")

    def interrupt(self, number: int) -> None:
        """Signal it; the main thread of a stopped rank, since any other that takes the signal first lets the main one go on."""
        if self.stopped:
            import ctypes  # 3 ms, and few jobs ever come here
            with ignoring(OSError, AttributeError):          # a C library without the call
                ctypes.CDLL(None).tgkill(self.pid, self.pid, number)
                return
        self.signal(number)

    def stack_bytes(self) -> int:
        return os.fstat(self.stack).st_size

    def stack_from(self, start: int) -> str:
        return os.pread(self.stack, 1 << 20, start).decode(errors="replace")

    def in_system_call(self) -> bool:
        """Whether one of its threads is in a system call that no signal ends."""
        try:
            return any(stat(f"{self.pid}/task/{thread}")[0] == "D" for thread in os.listdir(f"/proc/{self.pid}/task"))
        except OSError:
            return False


def stat(process: object) -> list[str]:
    """The fields of proc(5)'s stat from the state on, of a process or "PID/task/THREAD"; empty ones if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return [""] * (BORN + 1)


def transferred(pid: int) -> int:
    """Bytes that a process has read and written so far."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:
        return 0


def siblings(pid: int) -> list[tuple[int, int]]:
    """(rank, process) of the processes that the parent of `pid` has started, as far as the launcher numbers them."""
    variable = next((name for name in RANK_VARIABLES if name in os.environ), "")
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if variable and stat(entry)[PARENT] == stat(pid)[PARENT]:
            with open(f"/proc/{entry}/environ", "rb") as file:
                values = dict(part.split(b"=", 1) for part in file.read().split(b"\0") if b"=" in part)
            found.append((int(values.get(variable.encode(), -1)), int(entry)))
    return found
