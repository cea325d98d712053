"""The three standard streams of a process, as the rest of the program takes them for granted."""

from __future__ import annotations

import contextlib
import os
import select
import sys

GONE = 141                               # the exit status that a shell gives to a program that SIGPIPE ends: `... | head -1`


def finish() -> bool:
    """Writes what was printed so far; False where nobody reads it any more, and from then on it goes nowhere."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    looked = select.poll()
    looked.register(1, 0)
    gone = any(event & select.POLLERR for _, event in looked.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return not gone


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
    with contextlib.suppress(AttributeError):                             # somebody else's object
        sys.stdout.reconfigure(errors="backslashreplace")                 # type: ignore[union-attr]
