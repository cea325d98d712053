"""The table of a study as all its groups of ranks have it: the journal, and a lock file beside it.

    group A   [take the turn | read what is new | add the result, decide | write, sync | give it back]  trains ...
    group B                                     waits for A's turn ........................ [take it | ...

The first rank of each group keeps a copy of the table and applies the lines that others have written since. The trials of a study
share a file system anyway (a trial that pauses on one host goes on on another), so nothing else is needed, and nobody has to
answer while he computes. A window in the memory of rank 0 needs that: between hosts Open MPI 5.0.11 moves passive-target messages
only while the target is inside MPI, and a trial of one rank may not be for minutes.

A file that only one process can make (O_EXCL) is a lock on every file system, with locks of its own or without. Its text says
who holds it: a rank of this job. A job ends with all its ranks, so a file that is there when one begins was left by a rank that
was killed, and is removed. Some launchers let the other ranks live on; then who waits for the turn sees that its holder is gone,
on its own host by the process, elsewhere as far as MPI knows, and ends, too. Where a launcher was killed, ranks of its job may
live on for a while on other hosts, and somebody may `--resume` meanwhile: they read in the journal, before they write to it,
that another job has begun, and end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import claim
from mpitrain.errors import CheckpointError, OutputError, PeerError, print_warning
from mpitrain.files.disk import FILE_MODE, storage_error
from mpitrain.search.decisions import Action, Decisions
from mpitrain.search.journal import Journal, line_of, record_of
from mpitrain.search.pruners import Done
from mpitrain.search.table import Record

TURN = "turn"
SHORTEST_S, LONGEST_S = 50e-6, 2e-3       # pauses of who waits for the turn, which takes about a millisecond
STALE_S, LONG_S = 1.0, 30.0               # who waits for the turn looks so often whether its holder lives; when it warns
LOOK_S = 2e-3                             # pauses of who waits for another group's result


class Turn:
    """The lock file of a study; whoever holds it alone writes to the journal. Who waits for it calls `waits` now and then."""

    def __init__(self, folder: Path, waits: Callable[[], object] = lambda: None):
        self.path, self.waits = folder / TURN, waits
        self._me = claim.holder()
        self._said = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        pause, began, looked = SHORTEST_S, 0.0, 0.0
        while not self._take():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
            if pause == LONGEST_S:
                self.waits()
                now = time.monotonic()
                began, looked = began or now, looked or now
                if now - looked >= STALE_S:
                    looked = now
                    self._look_at_holder(now - began)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _take(self) -> bool:
        try:
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
            try:
                os.write(file, self._me.encode())
            finally:
                os.close(file)
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_error(error, "taking the turn in the study", self.path) from error
        return True

    def _look_at_holder(self, seconds: float) -> None:
        """PeerError where the process that holds the turn is gone (a rank that ends well gives it back before); a warning where
        it has been held for long and nobody can see why."""
        text = self.holder()
        if text and claim.is_alive(text) is False and self.holder() == text:
            raise PeerError(f"a rank has ended in the midst of a decision ({claim.shown(text)}), for which this one has waited "
                            f"{seconds:.0f} s; go on with --resume", file=self.path)
        if seconds > LONG_S and not self._said:
            self._said = True
            print_warning(f"{self.path}: this decision has been waited for since {seconds:.0f} s "
                          f"({claim.shown(text) or 'nobody says whose it is'}); if that process is gone, end this job, and go on "
                          "with --resume")

    def holder(self) -> str:
        """Who holds the turn, "" where nobody does, or has only begun to."""
        try:
            return self.path.read_bytes()[:claim.LONGEST].decode(errors="replace")
        except OSError:
            return ""

    def clear(self) -> str:
        """Removes the file that a job left which was killed; a line about it, or ""."""
        text = self.holder()
        try:
            self.path.unlink()
        except FileNotFoundError:
            return ""
        whose = f" ({claim.shown(text)})" if text else ""
        return f"{self.path}: a rank of an earlier job was killed in the midst of a decision{whose}; its lock is removed"


def _nobody(record: Record, table: Any) -> None:
    """Hears of records where nobody wants to."""


class SharedTable:
    """One group's copy of the table, which its first rank keeps; `told(record, table)` hears of each record in its order."""

    def __init__(self, decisions: Decisions, journal: Journal, told: Callable[[Record, Any], object] = _nobody,
                 waits: Callable[[], object] = lambda: None):
        self.decisions, self.journal, self.told = decisions, journal, told
        self.turn = Turn(journal.path.parent, waits)
        self.records: list[Record] = []                       # all of the journal, the header first
        self.seconds: list[float] = []                        # that decisions took, with the sync to the disk
        self.stops = False                                    # whether a group of this job was asked to stop
        self.offset = 0                                       # bytes of the journal that are in the table
        self._taken = False                                   # whether another job has begun since this one did

    def next(self, *outcomes: Mapping[str, Any]) -> Action:
        """Tells what this group's trial has come to, and takes up what it does next: both are on the disk when this returns. Done
        where the job is to stop."""
        with self.turn():
            began = time.perf_counter()
            self.catch_up()
            for record in outcomes:
                self._apply(dict(record))
            action, new = (Done(), []) if self.stops else self.decisions.next()
            now = time.time()
            decided = [{**record, "time": now} for record in new]
            if outcomes or decided:
                self.journal.append(*outcomes, *decided)
            self._keep(decided)
            self.offset += sum(len(line_of(record)) for record in (*outcomes, *decided))
            self.seconds.append(time.perf_counter() - began)
        return action

    def add(self, *records: Mapping[str, Any]) -> None:
        """Writes records without a decision."""
        with self.turn():
            self.catch_up()
            for record in records:
                self._apply(dict(record))
            self.journal.append(*records)
            self.offset += sum(map(len, map(line_of, records)))

    def catch_up(self) -> None:
        """Applies what other groups have written. CheckpointError where it cannot be read, OutputError where another job has
        begun to work on the study since."""
        known, lines = len(self.records), self._new().split(b"\n")
        for line in lines[:-1]:                               # behind the last end there is nothing, or a line in the making
            try:
                record = record_of(line)
            except ValueError as error:
                raise CheckpointError(f"a line of the journal is damaged ({error})", file=self.journal.path,
                                      offset=self.offset) from None
            if self.records:
                self._apply(record)
            else:
                self.records.append(record)                   # the header
            self.offset += len(line) + 1
        self._taken |= known > 0 and any(record.get("event") == "begins" for record in self.records[known:])
        if self._taken:
            raise OutputError("another job has begun to work on this study (--resume) while this one was at work, which ends now",
                              file=self.journal.path)

    def _new(self) -> bytes:
        with _reading(self.journal.path) as file:
            return os.pread(file, max(os.fstat(file).st_size - self.offset, 0), self.offset)

    def _apply(self, record: Record) -> None:
        self.decisions.apply(record)
        self._keep([record])

    def _keep(self, records: list[Record]) -> None:
        self.records += records
        for record in records:
            if record["kind"] == "job":
                self.stops = record["event"] == "stops"
            self.told(record, self.decisions.table)


def wait_for_more(journal: Path, offset: int, waits: Callable[[], object] = lambda: None) -> None:
    """Returns when a journal has more bytes than `offset`; `waits` is called now and then until it has."""
    while not _longer(journal, offset):
        time.sleep(LOOK_S)
        waits()


def _longer(journal: Path, offset: int) -> bool:
    with _reading(journal) as file:
        return os.fstat(file).st_size > offset


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    """The file, opened anew each time: only then does a network file system ask its server."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise storage_error(error, "reading the journal", path) from error
