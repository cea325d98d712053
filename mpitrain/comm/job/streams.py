"""The three standard streams of a process, as the rest of the program takes them for granted."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator

GONE = 141                               # the exit status that a shell gives to a program that SIGPIPE ends: `... | head -1`


class Output(io.TextIOWrapper):
    """Standard output whose errors name it: the operating system does not say what could not be written."""

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def finish() -> bool:
    """Writes what was printed so far; False where nobody reads it any more, and from then on it goes nowhere. OSError where it
    cannot be written, as on a full disk; then it goes nowhere, too."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError:
        drop()
        raise
    looked = select.poll()
    looked.register(1, 0)
    gone = any(event & select.POLLERR for _, event in looked.poll(0))
    if gone:
        drop()
    return not gone


def drop() -> None:
    """From now on what is printed goes nowhere, with what could not be written so far, which the interpreter tries again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def provide() -> None:
    """Opens descriptors 0, 1 and 2 where the caller closed them; prints what a stream's encoding lacks as escapes.

    The next file to be opened would get the number of a closed one, and our messages with it. Call this before any file is.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)      # the lowest free number is this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if type(sys.stdout) is io.TextIOWrapper:                              # else it is somebody else's object
        old = sys.stdout
        sys.stdout = Output(old.detach(), old.encoding, "backslashreplace", None, old.line_buffering, old.write_through)
        sys.__stdout__ = sys.stdout                                       # type: ignore[misc]
