"""What a private run has spent, on the disk before anybody sees what it bought."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.comm.job.together import on_first
from mpitrain.errors import CheckpointError
from mpitrain.files.disk import replace_file, storage_error
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

FILE = "privacy.json"


class Spends(Protocol):
    """The privacy of a run, `train.build.privacy.Privacy`."""

    def record(self) -> dict[str, Any]: ...
    def go_on_from(self, kept: Any) -> None: ...
    def go_on_after(self, step: int) -> None:
        """The run goes on after a step: its noise is found anew where it must be."""
    def told(self) -> dict[str, float]:
        """The fields of a step's line in metrics.jsonl."""
    def lines(self) -> list[str]:
        """What is told when the run starts."""


class Ledger(Observer):
    """A checkpoint knows the steps up to its own; those after it, which a run that ends without another one has shown in its
    metrics, are in this file, and are counted when it goes on. Rank 0 writes it. It should be the first observer."""

    def __init__(self, private: Spends, channel: Objects, notes: list[str]):
        self.private, self.channel, self.notes = private, channel, notes
        self.file: Path | None = None

    def begin(self, run: Watched) -> None:
        self.plan, self.more, self.file = run.plan, run.more, None if run.folder is None else run.folder / FILE
        kept = on_first(self.channel, self._kept)             # none in a new folder
        with guard.symmetric():
            if kept is not None:
                self._restore(kept)
            if kept is not None or run.step:
                self.private.go_on_after(run.step)
        self.notes += self.private.lines()

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self.more.update(self.private.told())
        if self.plan.logs(step) or self.plan.evaluates(step) or self.plan.saves(step):
            self._write()

    def finish(self, step: int) -> Mapping[str, Any]:
        self._write()
        return {"privacy": self.private.record()}

    def _write(self) -> None:
        if self.file is not None and self.channel.rank == 0:
            replace_file(self.file, json.dumps(self.private.record()) + "\n")

    def _kept(self) -> Any:
        if self.file is None:
            return None
        try:
            return json.loads(self.file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "reading", self.file) from error
        except (ValueError, RecursionError):
            raise self._damaged() from None

    def _restore(self, kept: Any) -> None:
        try:
            self.private.go_on_from(kept)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._damaged() from None

    def _damaged(self) -> CheckpointError:
        return CheckpointError("the record of what the run has spent of privacy is damaged, and steps after the checkpoint may "
                               "not be counted; remove it to count those of the checkpoint alone", file=self.file)
