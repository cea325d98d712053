"""A rank as the watcher of its node sees it: its record in shared memory (`record`), and what /proc says of it (`processes`).

This file imports little and runs on the standard library alone, as the watcher does.
"""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.memory import Memory
from mpitrain.comm.watch.processes import BORN, STOPPED, stat, transferred
from mpitrain.comm.watch.record import ANSWERS, COUNT, LENGTH, OVER, PHASE, PHASES, TEXT, step_in

FILES = ("start", "save", "finish")       # phases in which a rank may read or write files for long; bytes are progress then
FILE_BYTES = 1 << 16                      # so many of them
ANSWER_S = 1.0                            # a rank that can run Python at all answers within this
STOP, CONTINUE, KILL = 19, 18, 9


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
