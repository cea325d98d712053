"""The process that sets the knobs of a host for a run, and puts them back when the run is over, however that ends.

A rank that is killed undoes nothing, and a process that MPI has started may start no other one. So the first rank of a host
starts a guardian before MPI does: a process in a session of its own, that no signal to the job reaches, with a pipe from the
rank. It sets what it is told to, answers, and waits. The pipe is closed when the rank ends, by itself, by a signal, with the job
that another rank's end takes along, and the guardian puts everything back.

Where somebody kills the guardian, too, a record is left: /dev/shm/mpitrain-limits-..., which holds what was there before, and is
gone with the kernel's values when the host starts anew. The guardian holds a lock on it while it lives. A record without a lock
is undone by the next run on the host (`comm.shared.leftovers`), with or without limits of its own. One with a lock is another
run's: two runs that limit one host would each put back what the other one had set.

    in     one line of JSON: root, wanted, visible, paths | then "undo", or the end of the pipe
    out    one line of JSON for each: {"said": [lines]} or {"error": [class, message, file]}
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mpitrain.energy.knobs import Knob, knobs_of, set_all, undo_all
from mpitrain.errors import ConfigError, MpitrainError, OutputError

RECORDS, NAMED = Path("/dev/shm"), "mpitrain-limits-"
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Record:
    """What was there before, in a file that its owner holds a lock on. OutputError where another run holds it."""

    def __init__(self, path: Path):
        self.path, self._file = path, -1
        while self._file < 0:
            file = opened(path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = json.loads(os.pread(file, 1 << 20, 0) or b"{}").get("run", "unknown")
                os.close(file)
                raise OutputError(f"another run (process {owner}) holds the limits of this host, and puts them back at its end; "
                                  "wait for it, or leave energy.cap_watts, clock_mhz and gpu_cap_watts out", file=path) from None
            if is_at(file, path):
                self._file = file
            else:                                            # its owner has removed it between our two calls
                os.close(file)

    def read(self) -> dict[str, Any]:
        """ConfigError for one that cannot be understood."""
        text = os.pread(self._file, 1 << 20, 0)
        try:
            return dict(json.loads(text)) if text else {}
        except ValueError:
            raise ConfigError("this record of limits that a killed run has set is damaged; see that they are as they should be "
                              "(docs/knobs.md), and remove it", file=self.path) from None

    def holds(self) -> bool:
        return os.fstat(self._file).st_size > len("{}")

    def write(self, about: Mapping[str, Any]) -> None:
        data = json.dumps(about).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        os.close(self._file)


def opened(path: Path) -> int:
    """A descriptor of this user's own plain file; anybody may put something in its place, as all may write to that folder."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError("the limits of this host are another user's, or somebody has put something in the place of their "
                          f"record ({error.strerror}); see what it is", file=path) from None
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        os.close(file)
        raise OutputError("this record of limits was not written by this user's runs; see what it is, and remove it", file=path)
    return file


def is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def record_of(root: Path, folder: Path | None = None) -> Path:
    """The record of the tree that `root` belongs to: one a host for /sys, others for tests."""
    name = "".join(letter if letter.isalnum() else "-" for letter in str(root.absolute()).strip("/"))
    return (folder or records()) / f"{NAMED}{name[-180:]}"


def records() -> Path:
    return RECORDS if RECORDS.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))


class Limits:
    """The knobs that are set, and their record."""

    def __init__(self, wanted: Mapping[str, float], root: Path, visible: str | None, run: int):
        self.record, self._knobs = Record(record_of(root)), list[Knob]()
        try:
            self.said = undo_left(self.record)
            knobs = list(knobs_of(wanted, root, visible))
            self._knobs = [knob for knob, _ in knobs]
            about = {"run": run, "root": str(root), "wanted": dict(wanted), "visible": visible}
            self.said += set_all(knobs, lambda: self.record.write(
                about | {"before": {knob.name: knob.read() for knob in self._knobs}}))
        except BaseException:
            if self._knobs and all(knob.before is None for knob in self._knobs):
                self.record.write({})                        # what was set before one was refused is as it was
            self.record.close() if self.record.holds() else self.record.remove()
            raise

    def undo(self) -> list[str]:
        failed = undo_all(self._knobs)
        self.record.close() if failed else self.record.remove()
        return failed


def undo_left(record: Record) -> list[str]:
    """Undoes what a record says that a killed run has set; a line that says so. ConfigError where that cannot be done."""
    left = record.read()
    if not left.get("before"):
        return []
    knobs: list[Knob] = []
    for knob, _ in knobs_of(left["wanted"], Path(left["root"]), left["visible"]):
        knob.before = left["before"].get(knob.name)
        knobs.append(knob)
    if failed := undo_all(knobs):
        raise ConfigError(f"a run that was killed (process {left['run']}) has left limits on this host: {failed[0]}")
    record.write({})
    return [f"put back the limits that a killed run (process {left['run']}) had left on this host"]


def undo_leftovers(folder: Path) -> list[str]:
    """Undoes what killed runs have left, by their records in `folder`; a line for each. Those of runs that live stay."""
    said = []
    for path in sorted(folder.glob(f"{NAMED}*")):
        try:
            record = Record(path)
        except MpitrainError:
            continue
        try:
            said += undo_left(record)
            record.remove()
        except MpitrainError as error:
            record.close()
            said.append(str(error))
    return said


def serve(orders: IO[str], answers: IO[str]) -> None:
    order = json.loads(orders.readline() or "{}")
    if not order:
        return
    sys.path += [path for path in order["paths"] if path not in sys.path]        # where the run finds nvidia-ml-py
    try:
        limits = Limits(order["wanted"], Path(order["root"]), order["visible"], order["run"])
    except MpitrainError as error:
        answer(answers, {"error": [type(error).__name__, error.message, error.file]})
        return
    answer(answers, {"said": limits.said})
    asked = orders.readline()                                # or the end of the rank
    failed = limits.undo()
    if asked:
        answer(answers, {"said": failed})
    elif failed:
        os.write(2, "".join(f"\nwarning: {line}\n" for line in failed).encode())


def answer(answers: IO[str], what: Mapping[str, Sequence[str | None]]) -> None:
    with contextlib.suppress(OSError):                       # the rank has ended, which the next line from it tells
        print(json.dumps(what), file=answers, flush=True)


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    serve(sys.stdin, sys.stdout)
