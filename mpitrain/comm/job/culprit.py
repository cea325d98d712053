"""Whose code has failed: ours, or a user's. A user's file is any that is not in this package.

    net.py calls numpy, which raises                                   E_USER, and the line of net.py
    net.py calls an op, which raises what no error of ours is          E_BUG, where the op raised it, and the line of net.py
    the trainer raises, below the user's program                       E_BUG, and the line of the program
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import FrameType

from mpitrain.errors import place

PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
STANDARD = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
LIBRARIES = frozenset(("PIL", "cupy", "h5py", "mpi4py", "numba", "numpy", "scipy"))       # their errors are their callers'


def culprit(error: BaseException) -> tuple[str, str]:
    """A code, E_USER or E_BUG, and where: ``at net.py:9 in forward``, ``at engine.py:30 in run, called at net.py:9 in forward``.

    Of the user's frames the innermost counts, and one of his own files rather than a package that he has installed.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_library(frame)]
    users: list[tuple[FrameType, int]] = []
    last_is_ours = True
    for frame, line in frames:
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        if not is_ours:
            users = [*([] if last_is_ours else users), (frame, line)]       # the last of his frames that stand together
        last_is_ours = is_ours
    if not users:
        return "E_BUG", place(error)
    frame, line = next((one for one in reversed(users) if not _is_installed(one[0])), users[-1])
    where = f"at {Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    return ("E_BUG", f"{place(error)}, called {where}") if last_is_ours else ("E_USER", where)


def _is_library(frame: FrameType) -> bool:
    """Whether the code is Python's own, or one of LIBRARIES, which this package calls as well as a user does."""
    if str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        return True
    return frame.f_code.co_filename.startswith(STANDARD) and not _is_installed(frame)


def _is_installed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in INSTALLED)
