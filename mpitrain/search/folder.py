"""The folder of a study: one job at a time, nothing of anyone else's touched.

    runs/study/  config.toml  journal.jsonl  study.json  best.toml  [privacy.json]  trials/0007/...  errors/*.json  lock
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from mpitrain.checkpoint.run_folder import UNFINISHED, RunFolder
from mpitrain.errors import MissingError, OutputError, print_warning
from mpitrain.search.journal import NAME, Journal
from mpitrain.search.shared_table import TURN, Turn

ADVICE = "--resume goes on with the study that is there, --overwrite deletes it and starts anew; or set run.out to another folder"
FILES = (NAME, "study.json", "best.toml", TURN)
SPENT = "privacy.json"                    # of all trials; a run has one of that name, too
TRIAL = re.compile("[0-9]{4,9}")


class StudyFolder(RunFolder):
    """The paths of a study's files. Rank 0 calls `open`, which makes the folder and locks it."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self.trials = self.inner = self.path / "trials"
        self.study, self.best = self.path / "study.json", self.path / "best.toml"
        self.spent = self.path / SPENT
        self.journal = Journal(self.path / NAME)

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Takes the folder, for a new study or to go on with one. OutputError, AccessError as of `RunFolder.open`; OutputError,
        too, for the folder of a run, and MissingError where there is no study to go on with."""
        if self.checkpoints.is_dir():
            raise OutputError("the folder is that of a run, not of a study; set run.out to another one", file=self.path)
        if resume and not self.journal.path.is_file():
            raise MissingError("there is no journal of a study to go on with; start one without --resume", file=self.journal.path)
        self.open(resume=resume, overwrite=overwrite, advice=ADVICE)
        if said := Turn(self.path).clear():
            print_warning(said)

    def _refuse_contents(self, advice: str) -> None:
        begun = {self.config.name, self.trials.name, TURN}    # by a job that was killed before it began the journal
        if not (set(os.listdir(self.path)) - {"lock"} <= begun and not (self.trials.is_dir() and any(self.trials.iterdir()))):
            super()._refuse_contents(advice)

    def _delete_ours(self) -> None:
        for trial in sorted(self.trials.iterdir()) if self.trials.is_dir() and not self.trials.is_symlink() else ():
            if TRIAL.fullmatch(trial.name) and trial.is_dir() and not trial.is_symlink():
                _delete_run(trial)
        for name in FILES:
            for path in (self.path / name, self.path / (name + UNFINISHED)):
                path.unlink(missing_ok=True)
        super()._delete_ours()


def _delete_run(path: Path) -> None:
    """Deletes what runs write, and the folder where nothing else is in it."""
    run = RunFolder(path)
    run.open(overwrite=True)
    run.close()
    for left in (run.checkpoints, run.errors):
        with contextlib.suppress(OSError):
            left.rmdir()
    with contextlib.suppress(OSError):
        if os.listdir(path) == ["lock"]:
            (path / "lock").unlink()
        path.rmdir()
