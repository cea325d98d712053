"""The lock of a run folder on a file system that has none: files that only one process can make, with a sign of life.

    lock.1  free        lock.2  host=node07 pid=.. nonce=.. beat=00000042

The newest number counts. Who wants the folder makes the next one, which succeeds once (O_EXCL), and only where the holder of the
newest is free or dead. A holder counts up `beat`; who sees no change for STALE_S of its own clock takes it for dead, so clocks
of hosts are never compared. A holder that was only asleep finds a newer number, and publishes nothing any more.

Where one host has locks and another has none, each shows itself before it looks for the other: the first writes into `lock`
before it looks for numbers, the second makes its number before it reads `lock`, whose text means a holder until it is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from mpitrain.comm.watch.processes import BORN, stat
from mpitrain.errors import LostFolderError, MpitrainError, OutputError, StorageError
from mpitrain.files.disk import FILE_MODE, storage_error

NAME = re.compile(r"lock\.([0-9]{1,9})")
BEAT_S, STALE_S = 5.0, 30.0               # seconds between two signs of life; a file system may keep one back for some seconds
EMPTY_S = 2.0                             # a job writes into its new file at once, or it has ended, or its disk is full
POLL_S = 0.1
FREE = "free"
LONGEST = 400                             # bytes of such a file
CLAIMED = " claim"                        # in the text of `lock`: the holder gives signs of life, too


class Kernel(NamedTuple):
    """What tells whether the process numbers of two processes mean the same: the system as it was booted, the name space."""

    boot: str
    space: str


class Claim:
    """The claim of this process on the run folder `folder`: `take`, `refuse_lost` before each publication, `release`."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0
        self.nonce = secrets.token_hex(8)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """OutputError where another job holds the folder; it may wait for STALE_S to see whether that one lives."""
        try:
            while not self._try():
                pass                                         # another process was faster: look at that one
        except OSError as error:
            raise storage_error(error, "making the lock file", self.folder / "lock") from error
        self._thread = threading.Thread(target=self._live, name="mpitrain-lock", daemon=True)
        self._thread.start()

    def _try(self) -> bool:
        newest = newest_in(self.folder)
        seen = self._last_words(newest) if newest else FREE
        if seen is None:
            return False
        path = self.folder / f"lock.{newest + 1}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except FileExistsError:
            return False
        os.close(fd)
        self.number, self._who = newest + 1, holder()
        try:
            self._say(self._text(0))
            # The other one was looked at long before this one was made, and may have gone on since, or have got a successor.
            ours = newest_in(self.folder) == self.number and (not newest or read(self.folder, newest) in (seen, None))
        except BaseException:                                # an empty file would keep the next job waiting
            path.unlink(missing_ok=True)
            raise
        if not ours:
            path.unlink(missing_ok=True)
            return False
        for number in numbers(self.folder):
            if number < self.number:
                (self.folder / f"lock.{number}").unlink(missing_ok=True)
        return True

    def _last_words(self, number: int) -> str | None:
        """The text of a holder that is free or dead; None where the file is gone. OutputError if the holder lives."""
        seen, began = read(self.folder, number), time.monotonic()
        while seen not in (FREE, None) and time.monotonic() - began < (STALE_S if seen else EMPTY_S):
            if (alive := is_alive(seen or "")) is False:
                break
            now = read(self.folder, number)
            if now not in (FREE, None) and (alive or (now != seen and "nonce" in (seen or ""))):
                raise busy(now or "", self.folder)
            seen = now
            time.sleep(POLL_S)
        return seen

    def refuse_lost(self) -> None:
        """OutputError if another job has taken the folder from this one; the error of a file system that does not say."""
        try:
            newest = newest_in(self.folder)
            text = read(self.folder, newest) or ""
        except OSError as error:
            raise storage_error(error, "looking at the lock file", self.folder / "lock") from error
        if newest != self.number or self.nonce not in text:
            raise OutputError(f"another job has taken the run folder ({shown(text) or 'its lock file is gone'}), since this one "
                              f"gave no sign of life for {STALE_S:.0f} s; nothing more is written: wait for that job",
                              file=self.folder)

    def is_signed(self) -> bool:
        """Whether the claim's own file is in the folder, with its nonce. OSError of a file system that does not say."""
        return self.nonce in (read(self.folder, self.number) or "")

    def release(self) -> None:
        """Free the folder for another job. The file stays, so that numbers only grow."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError, MpitrainError):
            self.refuse_lost()
            self._say(FREE)

    def _live(self) -> None:
        """The signs of life. Another job's claim on the folder, an OutputError, ends this one.

        A folder that is away may be a mount that comes back; what is published meanwhile asks for itself.
        """
        beat = 0
        while not self._end.wait(BEAT_S):
            beat += 1
            with suppress(OSError, StorageError, LostFolderError):      # a full disk, a server away: the next may succeed
                self.refuse_lost()
                self._say(self._text(beat))

    def _text(self, beat: int) -> str:
        return f"{self._who} nonce={self.nonce} beat={beat:08d}"

    def _say(self, text: str) -> None:
        fd = os.open(self.folder / f"lock.{self.number}", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, padded(text), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def padded(text: str) -> bytes:
    """The bytes of a lock file, of one length: a reader never sees half of two."""
    return f"{text:<{LONGEST - 1}}\n".encode()


def numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := NAME.fullmatch(name))]


def newest_in(folder: Path) -> int:
    """0 where there is none."""
    return max(numbers(folder), default=0)


def read(folder: Path, number: int) -> str | None:
    """The text of a lock file, "" where its holder is just writing it, None where it is gone. OutputError for a file of another
    kind."""
    path = folder / f"lock.{number}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        text = os.pread(fd, LONGEST, 0).decode(errors="replace").strip()
    finally:
        os.close(fd)
    if text and text != FREE and not text.startswith("host="):
        raise OutputError("expected the lock file of a run, found another file of that name; rename it or set run.out to "
                          "another folder", file=path)
    return text


def refuse_locked(folder: Path, text: str) -> None:
    """OutputError if the text of `lock` is that of a job with locks that may live, which nothing shows on a host without them."""
    if text and CLAIMED not in text and is_alive(text) is not False:
        raise OutputError(f"the run folder is busy: a job holds it ({shown(text)}) by a lock of the file system, which this host "
                          "does not see; wait for that job, set run.out to another folder, or remove this file if it has ended",
                          file=folder / "lock")


def refuse_unlocked(folder: Path) -> None:
    """OutputError for a job that holds the folder by locks alone, and finds that one without them has taken it."""
    try:
        newest = newest_in(folder)
        text = read(folder, newest) if newest else None
    except OSError as error:
        raise storage_error(error, "looking at the lock file", folder / "lock") from error
    if text not in (FREE, None):
        raise OutputError(f"another job has taken the run folder ({shown(text or '')}) from a host without file locks; nothing "
                          "more is written: wait for that job", file=folder)


def busy(text: str, folder: Path) -> OutputError:
    """The error of a folder that is held by the job with this text."""
    return OutputError(f"the run folder is busy: a job holds it ({shown(text) or 'it is just starting'}); wait for it, or set "
                       "run.out to another folder", file=folder)


def holder() -> str:
    """This process, for others to read."""
    own, since = kernel(), datetime.now().astimezone().isoformat(timespec="seconds")
    return (f"host={socket.gethostname()} pid={os.getpid()} since={since} born={stat(os.getpid())[BORN]} boot={own.boot} "
            f"space={own.space}")


def kernel() -> Kernel:
    """This process's; empty where that is not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return Kernel(file.read().strip(), os.readlink("/proc/self/ns/pid"))
    return Kernel("", "")


def is_alive(text: str) -> bool | None:
    """Whether the holder's process runs; None where that cannot be seen from here."""
    said = dict(word.split("=", 1) for word in text.split() if "=" in word)
    own = kernel()
    if not own.boot or (said.get("boot"), said.get("space")) != own:
        return None
    now = stat(said.get("pid", ""))
    return now[BORN] == said.get("born") and now[0] not in "ZX"


def shown(text: str) -> str:
    """The part of the text that says something to people."""
    return text.partition(" born=")[0]
