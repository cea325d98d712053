"""The process that watches the ranks of a node and names the one that stands still; `pulse` starts it.

A rank that is stopped, or that holds Python's lock inside C, can say nothing itself. So another process looks, about once a
second, at the record that each rank keeps in shared memory, and asks ranks that do not move whether they wait for others. Who
does not wait, or cannot answer, is late. Where all ranks of a node wait, other nodes are late, and have a moment to say so.
There are no messages between nodes: the launcher ends the job on all of them when the ranks of one have ended.

The process ends when its own rank does, because its stdin is closed then. Orders come on it, a line each:

    start done | opens                    MPI has started, and the program does what it likes | it opens a run, and ranks follow
    run SIZE HOSTS                        a run of so many ranks begins, which are also on these other hosts
    rank NUMBER PID PIPE RECORD STACK     a rank of this node, with its descriptors
    folder HEX                            the run folder, from now on
    silent                                who is lost is told by others
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from mpitrain.comm.watch.ending import LAUNCHER_S, end_launcher, end_one_by_one, end_ranks, end_unconnected
from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.processes import PARENT, STOPPED, siblings, stat
from mpitrain.comm.watch.record import ASK, COUNT, HERE, PHASES, REST, silence
from mpitrain.comm.watch.seen import ANSWER_S, Rank
from mpitrain.comm.watch.stacks import keep, stacks_of
from mpitrain.comm.watch.words import has_checkpoint, place_in, write

MARGIN_S = 2.0                            # where all ranks of this node wait, another node has so long to name its own
STALL = 75                                # the exit code of a stall and of a lost rank
CUT_OFF_S = 1.5                           # the launcher has so long to end after its ranks where other hosts cannot be reached
LINE_LIMIT = 500
EACH, SPARE = 4, 32                       # open files: for a rank, and for all else (each look opens files of /proc)
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in a system call that does not return", "R": "running",
          "S": "asleep", "": "its process has ended"}


class Watcher:
    """`seconds` without progress are a stall (`start` of them until training begins), which `ends` the job or is only told.

    `leaves`: ranks know LEAVE_SIGNAL. `number` is the rank that has started this process, and ends it.
    """

    def __init__(self, seconds: float, start: float, ends: bool, number: int, size: int, leaves: bool):
        self.seconds, self.start, self.ends, self.number, self.size, self.leaves = seconds, start, ends, number, size, leaves
        self.period = min(1.0, seconds / 8)
        self.short = max(seconds / 10, 4 * self.period)      # who stands still for so long and goes on is told of
        self.began = self.looked = self.left = self.told_here = time.monotonic()
        self.ranks: list[Rank] = []
        self.files, self.unseen = most_files(), list[int]()  # `unseen`: ranks of this node for which they are not enough
        self.hidden, self.quiet = 0, False                   # ranks of this node that cannot be looked at; no order came of late
        self.awaits_start, self.joined = True, False         # whether MPI's start may take too long; whether there was a run
        self.others, self.folder, self.rest, self.cut_off = "", "", b"", False
        self.tells, self.told_end = True, False
        self.parent, self.host = os.getppid(), os.uname().nodename
        self.launcher = int(stat(self.parent)[PARENT] or 0)

    def run(self) -> None:
        while self.take_orders():
            self.look()
            self.left = time.monotonic()
        for rank in self.ranks:                              # the job may be over within a period of a rank's going on
            self.goes_on(rank)
        self.pause([], ANSWER_S)                             # for the end of the rank that has closed our stdin
        self.see_ends()

    def take_orders(self) -> bool:
        """Whether the rank that started this process lives, after a pause or an order."""
        self.quiet = 0 not in self.pause([0], self.period)
        if self.quiet:
            return True
        read = os.read(0, 1 << 16)
        *lines, self.rest = (self.rest + read).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "rank":
                self.take(*map(int, rest.split()))
            elif word == "run":
                size, self.others = rest.split(" ")
                for rank in self.ranks:
                    rank.close()
                self.size, self.ranks, self.unseen, self.hidden = int(size), [], [], 0
                self.awaits_start, self.joined = False, True
            elif word == "start":
                self.awaits_start, self.began = rest == "opens" and not self.joined, time.monotonic()
            elif word == "silent":
                self.tells = False
            elif word == "folder":
                self.folder = os.fsdecode(bytes.fromhex(rest))
        return bool(read)

    def take(self, number: int, pid: int, pipe: int, record: int, stack: int) -> None:
        if EACH * (len(self.ranks) + 1) + SPARE > self.files:
            self.unseen.append(number)
            return
        with ignoring(OSError):                              # its process cannot be seen from here: a container of its own
            self.ranks.append(Rank(number, pid, pipe, record, stack))
            self.ranks[-1].say(HERE)
            return
        self.hidden += 1

    def tell_of_hidden(self) -> None:
        write(f"warning: nobody watches for ranks that stand still on {self.host}: the watcher may not open /proc/PID/fd of them "
              f"({self.hidden} tried)")
        self.hidden = 0

    def tell_of_unseen(self) -> None:
        number = len(self.ranks) + len(self.unseen)
        write(f"warning: {len(self.unseen)} of {number} ranks on {self.host} are not watched, rank {self.unseen[0]} first: the "
              f"limit of open files is {self.files}; raise it (ulimit -Hn) to {EACH * number + SPARE} before the job starts")
        self.unseen, self.others = [], self.others or "not watched"

    def pause(self, files: list[int], seconds: float) -> list[int]:
        """Those of `files` that can be read; it returns at once when a rank of this node ends."""
        waited = [*files, *(rank.end for rank in self.ranks if rank.end >= 0 and not rank.ended)]
        looked = select.poll()                               # select takes no descriptor from 1024 on, and each rank has four
        for file in waited:
            looked.register(file, select.POLLIN)
        return [file for file, _ in looked.poll(seconds * 1000)] if waited else []

    # -- looking -----------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self.unseen:
            self.tell_of_unseen()
        self.see_ends()
        self.tell_of_itself()
        now = time.monotonic()
        passed, lost = now - self.looked, max(0.0, now - self.left - 3 * self.period, self.left - self.looked - 3 * ANSWER_S)
        self.looked = now                                    # `lost`: this process was stopped with the job, or had no core
        if not self.ranks:
            self.began += lost
            if self.hidden and self.quiet:                   # else they have perhaps only ended, and so does this process
                self.tell_of_hidden()
            if self.awaits_start and self.start and now - self.began >= self.start:
                self.not_started(now - self.began)
            return
        if all(rank.stopped for rank in self.ranks):
            lost = passed                                    # somebody has stopped the whole job, and may let it go on
        for rank in self.ranks:
            rank.since += lost
            self.goes_on(rank)
        self.judge([rank for rank in self.ranks if self.stands(rank) >= self.short and (rank.state or rank.phase != "finish")])

    def tell_of_itself(self) -> None:
        if time.monotonic() - self.told_here >= silence(self.seconds) / 2:
            self.told_here = time.monotonic()
            for rank in self.ranks:
                rank.say(HERE)

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

    def see_ends(self) -> None:
        """Tells of the first rank that was killed, or has crashed; the launcher ends others after it, and on other hosts all."""
        new = [rank for rank in self.ranks if rank.has_ended()]
        if not new or self.told_end or any(rank.over for rank in self.ranks):
            return
        rank = max(new, key=lambda rank: rank.memory.resident)
        if rank.memory.wanted():
            what, text = "E_MEMORY", rank.memory.words()
        elif self.tells and not (self.others and all(rank.ended for rank in self.ranks)):
            what, text = "E_PEER", "its process has ended without a word: it was killed, has crashed, or called os._exit"
            text += f"{rank.memory.narrow()}{'; go on with --resume' if has_checkpoint(self.folder) else ''}"
        else:
            return
        self.told_end = True
        self.goes_on(rank)
        from mpitrain.comm.job.turn import claim, leaves_ranks_out  # few jobs ever come here
        if self.tells and leaves_ranks_out() and not claim(STALL):
            return                                            # another rank, which is not ended with this one, has said so
        write(f"mpitrain: {self.place(rank, what)}: {text}")
        keep(self.folder, f"{self.place(rank, what)}: {text}", {rank: "none: its process has ended\n"})

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
            in_mpis_end = {rank for rank in late if rank.over and rank not in answers}       # there Python's threads are gone
            self.stall(min(late, key=lambda rank: (not rank.stopped, rank in in_mpis_end, rank.step, PHASES.index(rank.phase),
                                                   rank.since)), answers)
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
        stacks = stacks_of(self.ranks, ends=self.ends)
        text = (f"{self.place(late, 'E_STALL')}: no progress for {self.stands(late):.0f} s"
                f"{place_in(stacks.get(late, ''), late.phase)} {how}")
        self.print(text + keep(self.folder, text, stacks))
        if self.ends:
            if late.phase in ("finish", REST):
                end_one_by_one(late, self.ranks, leaves=self.leaves)
            else:
                end_ranks(self.ranks, leaves=self.leaves)
            if self.cut_off or not self.others:
                end_launcher(self.launcher, CUT_OFF_S if self.cut_off else LAUNCHER_S)
            sys.exit()

    def place(self, rank: Rank, code: str) -> str:
        return f"{code} rank={rank.number}/{self.size} host={self.host} step={rank.step} phase={rank.phase}"

    def not_started(self, seconds: float) -> None:
        """MPI_Init has not returned: a rank is missing, or stopped, which only its process shows."""
        number, how = self.number, "other ranks are missing, or do not get to MPI's start"
        found = siblings(self.parent, self.launcher) if self.size > 1 else []
        for other, pid in found:
            if stat(pid)[0] in STOPPED:
                number, how = other, STATES["T"]
        self.began = self.looked
        from mpitrain.comm.job.turn import claim  # few jobs ever come here
        if not self.ends or claim(STALL):
            self.print(f"E_STALL rank={number}/{self.size} host={self.host} phase=start: MPI has not started for {seconds:.0f} s "
                       f"({how}); see that all ranks start, or raise train.start_s")
        if self.ends:
            end_unconnected(self.parent, [pid for _, pid in found], self.launcher, leaves=self.leaves)

    def print(self, text: str) -> None:
        text = ("mpitrain: " if self.ends else "warning: ") + text
        write(text if len(text) <= LINE_LIMIT else text[:LINE_LIMIT - 3] + "...")


def most_files() -> int:
    """The number of files that this process may open, raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ignoring(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard if hard > 0 else 1 << 20                 # a kernel may have no limit
    return soft


def main() -> None:
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))      # what MPI has open in this process's rank
    seconds, start, ends, number, size, leaves = sys.argv[1:]
    Watcher(float(seconds), float(start), ends == "end", int(number), int(size), leaves == "1").run()
    os._exit(0)                                              # at once: who waits for the job waits for this process
