"""From an exception to its report: a code, an exit status, one ASCII line, and the record with the traceback."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.job.culprit import culprit
from mpitrain.comm.messages.lost_peer import says_lost
from mpitrain.errors import NOWHERE, MpitrainError, PeerError, name_and_text, place, said

LINE_LIMIT = 500

# (errno values, code, exit status) of an OSError that nobody turned into one of our own errors
OS_ERRORS = (((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG), "E_MISSING", 66),
             ((errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE), "E_IO", 74),
             ((errno.EACCES, errno.EPERM), "E_PERMISSION", 77),
             ((errno.EROFS,), "E_OUTPUT", 73))
ADVICE = {errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
          errno.EMFILE: "; raise the limit on open files of a process (ulimit -n), or close some",
          errno.ENFILE: "; this host has too many files open"}
NO_FOLDER = "the folder that this process was started in is gone; start it in one that exists"
# Where a process may have only so much address space, a library that is imported late and a thread say so in words of their own.
NO_ROOM = ("failed to map segment", "annot allocate memory", "can't start new thread")


@dataclass(frozen=True)
class Failure:
    """The end of a rank; `where` is the ``key=value`` part of the line, empty when nothing is known."""

    code: str
    exit_code: int
    where: str
    message: str
    traceback: str

    def line(self, rank: int, size: int) -> str:
        """The one line of the job, without its line end: printable ASCII of at most LINE_LIMIT characters."""
        head = f"mpitrain: {self.code} rank={rank}/{size} host={socket.gethostname()}"
        message = printable(self.message[:LINE_LIMIT])                        # megabytes would take the seconds that are left
        where = printable(self.where if len(self.where) <= 2 * LINE_LIMIT else self.where[:LINE_LIMIT] + self.where[-LINE_LIMIT:])
        room = max(LINE_LIMIT // 2, LINE_LIMIT - len(head) - len(message) - 3)
        if len(where) > room:                                                 # of a long path, what was wrong with it is the news
            where = f"{where[:room // 2 - 3]}...{where[-(room // 2):]}"
        text = f"{head} {where}: {message}" if where else f"{head}: {message}"
        return text if len(text) <= LINE_LIMIT else text[:LINE_LIMIT - 3] + "..."


def describe(error: BaseException, moment: Mapping[str, object] = NOWHERE) -> Failure:
    """The code, exit status and message of any exception; `moment` is the step and phase that it came in, as far as known."""
    where = " ".join(f"{name}={value}" for name, value in moment.items())
    trace = "".join(traceback.format_exception(error))
    match error:
        case MpitrainError():
            return Failure(error.code, error.exit_code, error.where(moment), error.message, trace)
        case KeyboardInterrupt():
            return Failure("E_INTERRUPT", 130, where, "interrupted", trace)
        case _ if ran_out_of_memory(error):
            what = f"out of memory {place(error)}: {said(error) or 'an allocation failed'}{memory_limit()}"
            return Failure("E_MEMORY", 71, where, f"{what}; use a smaller batch_size, more micro_batches, or more nodes", trace)
        case SystemExit():
            code = error.code if isinstance(error.code, int) else 1
            how = "the program ended by"
            if error.__traceback__:                           # its number would be read as ours: 85 is a run to start again
                return Failure("E_EXIT", 70, where, f"{how} sys.exit({error.code!r}) {place(error)} in the midst of its work; "
                               "raise an exception that says why instead", trace)
            return Failure("E_EXIT", code % 256 or 70, where, f"{how} returning {code} while other ranks may go on", trace)
        case OSError():
            return describe_os_error(error, trace, where)
    whose, at = culprit(error)
    return Failure(whose, 70, where, name_and_text(error, at), trace)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, also where Python or the loader of libraries calls it otherwise."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    late = isinstance(error, (ImportError, RuntimeError)) and memory_limit() and any(words in said(error) for words in NO_ROOM)
    return isinstance(error, MemoryError) or bool(late)


def memory_limit() -> str:
    """What a limit on this process's memory (`ulimit -v`) says of a failed allocation; "" where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (a process may have {limit >> 20} MiB: ulimit -v)"


def as_peer_error(error: BaseException) -> PeerError | None:
    """An error of MPI itself that says another rank has died, as PeerError."""
    if not says_lost(error):
        return None
    lost = PeerError(f"MPI reports {error} {place(error)}; another rank was probably lost")
    lost.__traceback__ = error.__traceback__
    return lost


def describe_os_error(error: OSError, trace: str, where: str) -> Failure:
    """The same of an OSError; `where` is the step and phase."""
    named = isinstance(error.filename, (str, bytes))
    if named:
        where = f'{where} file="{os.fsdecode(error.filename)}"'.lstrip()
    for numbers, code, exit_code in OS_ERRORS:
        if error.errno in numbers:
            what = (error.strerror or str(error)) + ("" if named else f" {place(error)}") + ADVICE.get(error.errno or 0, "")
            what = NO_FOLDER if code == "E_MISSING" and not named and _is_nowhere() else what
            return Failure(code, exit_code, where, what, trace)
    whose, at = culprit(error)
    message = f"{type(error).__name__} {at}: {error.strerror}" if error.strerror else name_and_text(error, at)
    return Failure(whose, 70, where, message, trace)


def _is_nowhere() -> bool:
    """Whether the current folder has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def printable(text: str) -> str:
    r"""Printable ASCII; every other byte of the text's UTF-8 as ``\xNN`` (undecodable bytes of file names as they are)."""
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in text.encode("utf-8", "surrogateescape"))


def write_record(folder: Path, failure: Failure, rank: int, size: int) -> None:
    """``errors/rank-R.json`` in the run folder, readable by the owner only: the line, the code, and the traceback."""
    errors = folder / "errors"
    errors.mkdir(mode=0o775, exist_ok=True)                   # a run folder that was removed is not made again
    record = {"code": failure.code, "exit_code": failure.exit_code, "rank": rank, "size": size,
              "host": socket.gethostname(), "time": time.time(), "line": failure.line(rank, size),
              "traceback": failure.traceback}
    descriptor = os.open(errors / f"rank-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)                          # an older file may have other permissions
        json.dump(record, file, indent=1)
