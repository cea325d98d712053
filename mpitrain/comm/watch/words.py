"""What the watcher says: the line of a program in its stacks, whether there is something to go on from, and the writing."""

from __future__ import annotations

import os

from mpitrain.comm.watch.ignoring import ignoring

LIBRARY = os.path.dirname(os.__file__)    # frames of the standard library say less than who called it
ANSWERS = 'watch/pulse.py", line'         # with the function `_listen`: the thread that answers the watcher, in every rank


def place_in(stacks: str, phase: str) -> str:
    """`` in FUNCTION at FILE:LINE`` of the innermost frame outside the standard library, of the thread that matters."""
    threads = [block for block in stacks.split("\n\n") if "(most recent call first)" in block
               and not (ANSWERS in block and " in _listen" in block)]
    reading = [block for block in threads[:-1] if 'loader.py", line' in block] if phase == "load" else []
    for block in [*reading, *reversed(threads)]:             # the main thread comes last
        for line in block.split("\n"):
            _, quote, rest = line.partition('File "')
            path, _, rest = rest.partition('", line ')
            number, _, function = rest.partition(" in ")
            if quote and (not path.startswith((LIBRARY, "<frozen")) or "site-packages" in path):
                return f" in {function} at {os.path.basename(path)}:{number}"
    return ""


def has_checkpoint(folder: str) -> bool:
    """Whether there is one to go on from in the run folder."""
    try:
        return bool(folder) and any(name.startswith("step-") for name in os.listdir(os.path.join(folder, "checkpoints")))
    except OSError:
        return False


def write(line: str) -> None:
    """One line on stderr, printable ASCII; nobody may be reading it."""
    text = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in line.encode("utf-8", "surrogateescape"))
    with ignoring(OSError):
        os.write(2, b"\n" + text.encode() + b"\n")
