"""A rank's part in the limits of its host: the guardian it has started before MPI, and what that has answered."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GUARDIAN = (f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
            "from mpitrain.energy.guardian import main; main()")
LOST = "the process that puts the limits of this host back was gone before the run ended; the next run on this host does it"


class HostLimits:
    """The limits of this host while a run lasts. The first rank of each host makes one, before MPI starts.

    `said` has a line for each setting; `refused` is [class, message, file] of the error where there are none, which all ranks
    have to hear of.
    """

    def __init__(self, wanted: Mapping[str, float], root: Path):
        self.wanted = dict(wanted)
        self.said: list[str] = []
        self.refused: list[Any] | None = None
        paths = [path for path in sys.path if os.path.isabs(path) and path != os.getcwd()]
        self._process = subprocess.Popen([sys.executable, "-I", "-c", GUARDIAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, start_new_session=True)
        answer = self._ask({"root": str(root.absolute()), "wanted": self.wanted, "run": os.getpid(), "paths": paths,
                            "visible": os.environ.get("CUDA_VISIBLE_DEVICES")})
        if "said" in answer:
            self.said = answer["said"]
        else:
            self.refused = answer.get("error", ["MpitrainError", "the process that sets the limits of this host has ended, and "
                                                "has not answered", None])
            self.undo()

    def contact(self) -> list[int] | None:
        """This process and its end of the guardian's pipe, for `held_by`; None where there is none any more."""
        pipe = self._process.stdin
        return None if pipe is None or pipe.closed else [os.getpid(), pipe.fileno()]

    def undo(self) -> list[str]:
        """Puts back what was there, at a run's normal end; what could not be, in words. Nothing the second time."""
        if self._process.stdin is None or self._process.stdin.closed:
            return []
        answer = self._ask("undo") if self.refused is None else {"said": []}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
        return list(answer.get("said", [LOST]))

    def _ask(self, what: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write((what if isinstance(what, str) else json.dumps(what)) + "\n")
            self._process.stdin.flush()
            return dict(json.loads(self._process.stdout.readline() or "{}"))
        except BrokenPipeError:
            return {}


def held_by(process: int, pipe: int) -> int:
    """Another end of a guardian's pipe, of a process of this host: while it is open the limits stay, whoever has set them. -1
    where it cannot be had, as between containers; then they last as long as that process."""
    try:
        return os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1
