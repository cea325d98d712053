"""The process that watches the ranks of a node and names the one that stands still; `pulse` starts it.

A rank that is stopped, or that holds Python's lock inside C, can say nothing itself. So another process looks, about once a
second, at the record that each rank keeps in shared memory, and asks ranks that do not move whether they wait for others. Who
does not wait, or cannot answer, is late. Where all ranks of a node wait, other nodes are late, and have a moment to say so.
There are no messages between nodes: the launcher ends the job on all of them when the ranks of one have ended.

The process ends when its own rank does, because its stdin is closed then. Orders come on it, a line each:

    run SIZE HOSTS                        a run of so many ranks begins, which are also on these other hosts
    rank NUMBER PID PIPE RECORD STACK     a rank of this node, with its descriptors
    folder HEX                            the run folder, from now on
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress

from mpitrain.comm.watch.seen import (
    ASK,
    BORN,
    CONTINUE,
    COUNT,
    KILL,
    LEAVE,
    LEAVE_SIGNAL,
    PARENT,
    PHASES,
    REST,
    STACK_SIGNAL,
    STOP,
    STOPPED,
    Rank,
    siblings,
    stat,
)

ANSWER_S = 1.0                            # a rank that can run Python at all answers within this
MARGIN_S = 2.0                            # where all ranks of this node wait, another node has so long to name its own
LAUNCHER_S, CUT_OFF_S = 3.0, 1.5          # the launcher has so long to end after its ranks; where other hosts cannot be reached
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted")
LINE_LIMIT = 500
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in a system call that does not return", "R": "running",
          "S": "asleep", "": "its process has ended"}
LIBRARY = os.path.dirname(os.__file__)    # frames of the standard library say less than who called it


class Watcher:
    """`seconds` without progress are a stall (`start` of them until training begins), which `ends` the job or is only told.

    `leaves`: ranks know LEAVE_SIGNAL. `number` is the rank that has started this process, and ends it.
    """

    def __init__(self, seconds: float, start: float, ends: bool, number: int, size: int, leaves: bool):
        self.seconds, self.start, self.ends, self.number, self.size, self.leaves = seconds, start, ends, number, size, leaves
        self.period = min(1.0, seconds / 8)
        self.short = max(seconds / 10, 4 * self.period)      # who stands still for so long and goes on is told of
        self.began = self.looked = self.left = time.monotonic()
        self.ranks: list[Rank] = []
        self.others, self.folder, self.rest, self.cut_off = "", "", b"", False
        self.parent, self.host = os.getppid(), os.uname().nodename
        self.launcher = int(stat(self.parent)[PARENT] or 0)

    def run(self) -> None:
        while self.take_orders():
            self.look()
            self.left = time.monotonic()
        for rank in self.ranks:                              # the job may be over within a period of a rank's going on
            self.goes_on(rank)

    def take_orders(self) -> bool:
        """Whether the rank that started this process lives, after a pause or an order."""
        if not select.select([0], [], [], self.period)[0]:
            return True
        read = os.read(0, 1 << 16)
        *lines, self.rest = (self.rest + read).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "rank":
                self.take(*map(int, rest.split()))
            elif word == "run":
                size, self.others = rest.split(" ")
                self.size, self.ranks = int(size), []
            elif word == "folder":
                self.folder = os.fsdecode(bytes.fromhex(rest))
        return bool(read)

    def take(self, number: int, pid: int, pipe: int, record: int, stack: int) -> None:
        with suppress(OSError):                              # its process cannot be seen from here: a container of its own
            self.ranks.append(Rank(number, pid, pipe, record, stack))

    # -- looking -----------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        now = time.monotonic()
        passed, lost = now - self.looked, max(0.0, now - self.left - 3 * self.period, self.left - self.looked - 3 * ANSWER_S)
        self.looked = now                                    # `lost`: this process was stopped with the job, or had no core
        if not self.ranks:
            self.began += lost
            if self.start and now - self.began >= self.start:
                self.not_started(now - self.began)
            return
        if all(rank.stopped for rank in self.ranks):
            lost = passed                                    # somebody has stopped the whole job, and may let it go on
        for rank in self.ranks:
            rank.since += lost
            self.goes_on(rank)
        self.judge([rank for rank in self.ranks if self.stands(rank) >= self.short and (rank.state or rank.phase != "finish")])

    def stands(self, rank: Rank) -> float:
        """Seconds since it moved."""
        return self.looked - rank.since

    def limit(self, rank: Rank) -> float:
        seconds = {"start": self.start, REST: 0.0}.get(rank.phase, self.seconds)
        return seconds or float("inf")

    def goes_on(self, rank: Rank) -> None:
        step, phase, stood = rank.step, rank.phase, self.stands(rank)
        if rank.moved():
            if rank.held_up and stood >= self.short:
                write(f"warning: rank {rank.number} on {self.host} stood still for {stood:.0f} s in {phase} of step {step} and "
                      "goes on; other ranks waited for it")
            rank.since, rank.held_up = self.looked, False

    def judge(self, silent: list[Rank]) -> None:
        if not silent:
            return
        answers = self.ask(silent)
        still = [rank for rank in silent if not answers.get(rank, [""])[0]]
        for rank in still:
            rank.held_up = rank.stopped or len(silent) == len(self.ranks) > len(still)
        late = [rank for rank in still if self.stands(rank) >= self.limit(rank)]
        margin = MARGIN_S if self.others else 0.0
        if late:
            self.stall(min(late, key=lambda rank: (not rank.stopped, rank.step, PHASES.index(rank.phase), rank.since)), answers)
        elif not still and len(silent) == len(self.ranks) and all(self.stands(r) >= self.limit(r) + margin for r in silent):
            self.all_wait(min(silent, key=lambda rank: (rank.step, rank.since)), answers)

    def ask(self, ranks: list[Rank]) -> dict[Rank, list[str]]:
        """The answers of those that can run Python."""
        asked = {rank: rank.answers() for rank in ranks if rank.state not in ("", *STOPPED)}
        for rank in asked:
            rank.say(ASK)
        end = time.monotonic() + ANSWER_S
        while any(rank.answers() == before for rank, before in asked.items()) and time.monotonic() < end:
            time.sleep(0.01)
        return {rank: rank.answer() for rank, before in asked.items() if rank.answers() != before}

    # -- saying ------------------------------------------------------------------------------------------------------------

    def stall(self, late: Rank, answers: dict[Rank, list[str]]) -> None:
        state = late.state
        how = STATES["D"] if state not in ("", *STOPPED) and late.in_system_call() else STATES.get(state, state)
        if how in (STATES["R"], STATES["S"]) and late not in answers:
            how += ", with the interpreter's lock held"
        waiting = [rank for rank in answers if answers[rank][0]]
        if waiting:
            numbers = ", ".join(str(rank.number) for rank in waiting)
            how += f"); rank {numbers} waits for it" if len(waiting) == 1 else f"); ranks {numbers} wait for it"
            how += "".join(f" in {what}" for what in answers[waiting[0]][1:])
        self.report(late, f"({how}" + ")" * (not waiting))

    def all_wait(self, first: Rank, answers: dict[Rank, list[str]]) -> None:
        waits = ", ".join(f"rank {rank.number} in {(answers[rank] + [rank.phase])[1]}" for rank in self.ranks)
        self.cut_off = bool(self.others)
        whom = f"ranks of other hosts ({self.others}), which stand still or cannot be reached" if self.others else "each other"
        self.report(first, f"(all ranks of this host wait for {whom}: {waits})")

    def report(self, late: Rank, how: str) -> None:
        if late.told == late.words[COUNT]:
            return
        late.told = late.words[COUNT]
        stacks = self.stacks()
        text = (f"E_STALL rank={late.number}/{self.size} host={self.host} step={late.step} phase={late.phase}: no progress for "
                f"{self.stands(late):.0f} s{place_in(stacks.get(late, ''), late.phase)} {how}")
        self.print(text + self.keep(text, stacks))
        if self.ends:
            self.end()

    def not_started(self, seconds: float) -> None:
        """MPI_Init has not returned: a rank is missing, or stopped, which only its process shows."""
        number, how = self.number, "other ranks are missing, or do not get to MPI's start"
        for other, pid in siblings(self.parent):
            if stat(pid)[0] in STOPPED:
                number, how = other, STATES["T"]
        self.print(f"E_STALL rank={number}/{self.size} host={self.host} phase=start: MPI has not started for {seconds:.0f} s "
                   f"({how}); see that all ranks start, or raise train.start_s")
        self.began = self.looked
        if self.ends:
            os.kill(self.parent, LEAVE_SIGNAL if self.leaves else KILL)

    def print(self, text: str) -> None:
        text = ("mpitrain: " if self.ends else "warning: ") + text
        write(text if len(text) <= LINE_LIMIT else text[:LINE_LIMIT - 3] + "...")

    # -- stacks, and the end -----------------------------------------------------------------------------------------------

    def stacks(self) -> dict[Rank, str]:
        """What Python's fault handler writes on each rank.

        If the job is to end, a stopped rank goes on for it, and all others are stopped before: else they would go on with it, and
        Open MPI's mpirun has waited for ever after ranks that ended in the midst of MPI_Finalize.
        """
        stopped = [rank for rank in self.ranks if rank.stopped]
        found = self.stacks_of([rank for rank in self.ranks if rank.state and rank not in stopped])
        if self.ends:
            for rank in found:
                rank.signal(STOP)
            found |= self.stacks_of(stopped)
            for rank in stopped:
                rank.signal(STOP)
        return found

    def stacks_of(self, ranks: list[Rank]) -> dict[Rank, str]:
        before = {rank: rank.stack_bytes() for rank in ranks}
        for rank in ranks:
            rank.interrupt(STACK_SIGNAL)
            rank.signal(CONTINUE)
        end, sizes, last = time.monotonic() + ANSWER_S, [0], [1]
        while (sizes != last or any(size == before[rank] for size, rank in zip(sizes, ranks))) and time.monotonic() < end:
            time.sleep(0.01)
            last, sizes = sizes, [rank.stack_bytes() for rank in ranks]
        return {rank: rank.stack_from(before[rank]) for rank in ranks}

    def keep(self, line: str, stacks: dict[Rank, str]) -> str:
        """Write them to the run folder, for the owner alone; returns the end of the line."""
        if not self.folder:
            return ""
        errors = os.path.join(self.folder, "errors")
        try:
            os.makedirs(errors, exist_ok=True)
            for rank, text in stacks.items():
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                file = os.open(os.path.join(errors, f"rank-{rank.number}.stack.txt"), flags, 0o600)
                os.fchmod(file, 0o600)
                os.write(file, f"{line}\n\nstacks of rank {rank.number}:\n\n{text}".encode("utf-8", "surrogateescape"))
                os.close(file)
        except OSError as error:
            return f"; stacks could not be written to {errors}: {error.strerror}"
        return f"; stacks of all ranks: {errors}/rank-*.stack.txt"

    def end(self) -> None:
        """End the ranks of this node with the exit code of a stall; one that can do nothing of the kind is killed."""
        for rank in self.ranks:
            rank.signal(LEAVE_SIGNAL) if self.leaves else rank.say(LEAVE)
            rank.signal(CONTINUE)
        limit = time.monotonic() + ANSWER_S
        while any(rank.state for rank in self.ranks) and time.monotonic() < limit:
            time.sleep(0.01)
        for rank in self.ranks:
            rank.signal(KILL)
        if self.cut_off or not self.others:
            self.end_launcher(CUT_OFF_S if self.cut_off else LAUNCHER_S)
        sys.exit()

    def end_launcher(self, seconds: float) -> None:
        """Kill Open MPI's mpirun, or its daemon on another host, where it does not end by itself.

        With the network down, the two wait for each other for minutes; two SIGTERM or two SIGINT did not end them (5.0.11).
        """
        with suppress(OSError), open(f"/proc/{self.launcher}/comm") as file:
            known, born = file.read().strip() in LAUNCHERS, stat(self.launcher)[BORN]
            limit = time.monotonic() + seconds
            while known and stat(self.launcher)[BORN] == born and time.monotonic() < limit:
                time.sleep(0.01)
            if known and stat(self.launcher)[BORN] == born:
                os.kill(self.launcher, KILL)


def place_in(stacks: str, phase: str) -> str:
    """`` in FUNCTION at FILE:LINE`` of the innermost frame outside the standard library, of the thread that matters."""
    threads = [block for block in stacks.split("\n\n") if "(most recent call first)" in block]
    reading = [block for block in threads[:-1] if 'loader.py", line' in block] if phase == "load" else []
    for block in [*reading, *reversed(threads)]:             # the main thread comes last
        for line in block.split("\n"):
            _, quote, rest = line.partition('File "')
            path, _, rest = rest.partition('", line ')
            number, _, function = rest.partition(" in ")
            if quote and (not path.startswith((LIBRARY, "<frozen")) or "site-packages" in path):
                return f" in {function} at {os.path.basename(path)}:{number}"
    return ""


def write(line: str) -> None:
    """One line on stderr, printable ASCII; nobody may be reading it."""
    text = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in line.encode("utf-8", "surrogateescape"))
    with suppress(OSError):
        os.write(2, b"\n" + text.encode() + b"\n")


def main() -> None:
    seconds, start, ends, number, size, leaves = sys.argv[1:]
    Watcher(float(seconds), float(start), ends == "end", int(number), int(size), leaves == "1").run()
