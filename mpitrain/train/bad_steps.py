"""Steps whose loss or gradient is not finite: their record in the run folder, and leaving them out (`train.on_nan`).

    steps    ... 400 (saved)  401 ... 436  437 (NaN)  438 ...
    skip         update       update       -          goes on from the state after 436
    rewind       update       undone       -          goes on from the state after 400
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.data import Loader
from mpitrain.errors import MpitrainError, NumericsError
from mpitrain.files.disk import make_folder
from mpitrain.parallel.pipeline.nonfinite import listed

MOST_IN_A_ROW = 10                       # steps that are left out one after the other: then the run has diverged
MOST_REWINDS = 3                         # without a step that was updated and saved since: then the saved state is no good one


class BadSteps:
    """Records and counts the steps of a run that are not finite; all ranks have one. `skipped` counts those left out.

    `go_back()`, where set, takes the state of the last checkpoint and returns its step; it communicates.
    """

    def __init__(self, loader: Loader, channel: Objects):
        self.loader, self.channel = loader, channel
        self.go_back: Callable[[], int] | None = None
        self.most_in_a_row = MOST_IN_A_ROW
        self.rewinds: list[dict[str, Any]] = []               # {"step": the step that was not finite, "to": the checkpoint's}
        self.skipped, self._in_a_row, self._last, self._fruitless = 0, 0, 0, 0

    def record(self) -> dict[str, Any]:
        """The steps left out so far, for run.json and checkpoints."""
        return ({"skipped": self.skipped} if self.skipped else {}) | ({"rewinds": self.rewinds} if self.rewinds else {})

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Goes on from the `record` in a checkpoint's meta."""
        skipped, rewinds = meta.get("skipped"), meta.get("rewinds")
        self.skipped = skipped if isinstance(skipped, int) else 0
        self.rewinds = list(rewinds) if isinstance(rewinds, list) else []

    def describe(self, step: int, error: NumericsError) -> dict[str, Any]:
        """The rank, micro-batch and samples of an error, as plain data; all samples of the step where no fewer are known."""
        rows = error.rows or [int(row) for row in self.loader.sampler.rows(step - 1)]
        where = [self.loader.reader.source.where(row) for row in rows]
        files = {file: [place for other, place in where if other == file] for file in sorted({file for file, _ in where})}
        return {"rank": self.channel.rank, "host": socket.gethostname(), "micro_batch": error.micro_batch,
                "rows": list(rows), "files": files, "message": error.message}

    def stop(self, folder: Path | None, step: int, error: NumericsError) -> None:
        """Leaves the record of the step that ends the run, and tells the error the file of its samples. It does not communicate:
        a rank may be alone with the error."""
        if not error.rows and self.channel.rank:
            return                                        # all ranks have the same gradient, and so the same error
        cause = self.describe(step, error)
        if error.rows and len(cause["files"]) == 1:
            error.file = next(iter(cause["files"]))
        self.write(folder, step, [cause])

    def leave_out(self, folder: Path | None, step: int, errors: Sequence[NumericsError], blamed: str,
                  tell: Callable[[str], None]) -> None:
        """Counts, records and tells a step that is left out, perhaps with those since the last checkpoint. It communicates.
        NumericsError after too many in a row."""
        everyone = self.channel.gather_objects([self.describe(step, error) for error in errors])
        causes = [cause for causes in everyone for cause in causes]
        if not causes:
            causes = [self.describe(step, NumericsError(f"the gradient of {blamed} is not finite"))]
        if self.channel.rank == 0:
            self.write(folder, step, causes)                  # now: there may be no state to go back to
        to = None if self.go_back is None else self.go_back()
        self._count(step, step - 1 if to is None else to)
        if self.channel.rank == 0 and to is not None:
            self.write(folder, step, causes, went_back_to=to)
        undone = "no parameter was changed" if to is None else \
            f"the run goes on from the checkpoint of step {to}, without what was learnt since"
        tell(f"step {step}  left out: {said(causes[0])}; {undone}; {self.skipped} left out so far")
        if self.most_in_a_row == 1:
            with guard.symmetric():
                raise NumericsError(f"{said(causes[0])}; no parameter was changed in this step; try a smaller optimizer.lr, or "
                                    "optimizer.clip_norm", step=step)
        if self._in_a_row >= self.most_in_a_row or self._fruitless > MOST_REWINDS:
            often = f"{self.most_in_a_row} steps in a row were not finite" if to is None else \
                f"after {MOST_REWINDS} returns to saved states, the last one that of step {to}, training is not finite again"
            with guard.symmetric():
                raise NumericsError(f"{often}, the last one because {said(causes[0])}; resume from "
                                    f"{'a' if to is None else 'an earlier'} checkpoint with a smaller optimizer.lr, or "
                                    "optimizer.clip_norm", step=step)

    def _count(self, step: int, to: int) -> None:
        """Counts the steps after `to` until `step`, which are left out now; some may have been before."""
        if self.go_back is not None:
            self._fruitless = self._fruitless + 1 if to <= self._last else 1
            self.rewinds.append({"step": step, "to": to})
        self.skipped += step - max(to, self._last)
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last = step

    def write(self, folder: Path | None, step: int, causes: Sequence[dict[str, Any]], **more: int) -> None:
        """``errors/step-S.json``; a disk that takes no more is no reason to end otherwise."""
        if folder is None or not folder.is_dir():              # one that was removed is not made again
            return
        files = RunFolder(folder)
        with contextlib.suppress(MpitrainError, OSError):
            make_folder(files.errors)
            files.write_json(files.errors / f"step-{step}.json", {"step": step, "seed": self.loader.sampler.seed, **more,
                                                                  "causes": list(causes)})


def said(cause: dict[str, Any]) -> str:
    """A cause in a few words."""
    short = cause["message"].partition("; no parameter")[0]
    if cause["micro_batch"] is None:
        return f"{short} (samples {listed(cause['rows'])})"
    return f"{short} (rank {cause['rank']}, {cause['host']})"
