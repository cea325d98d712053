"""The record of what a run has spent: written at each line of metrics, counted by whoever goes on, never trusted when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.privacy.accountant import RenyiAccountant, Spent
from mpitrain.train.intervals import Plan, Step
from mpitrain.train.observers.ledger import FILE, Ledger
from mpitrain.train.observers.observer import Watched

PLAN = Plan(steps=10, steps_per_epoch=5, batch_size=8, eval_every=4, checkpoint_every=0, keep_best=False, log_every=3)


class Alone:
    rank, size = 0, 1

    def broadcast_object(self, value: Any, /) -> Any:
        return json.loads(json.dumps(value))

    def gather_objects(self, value: Any, /) -> list[Any]:
        return [value]


class Run:
    """A run of so many steps: as much of `train.build.privacy.Privacy` as a ledger sees."""

    def __init__(self, folder: Path, step: int = 0, delta: float = 1e-5):
        self.spent, self.delta, self.after = Spent(RenyiAccountant(), delta), delta, -1
        self.notes: list[str] = []
        self.ledger = Ledger(self, Alone(), self.notes)
        self.ledger.begin(Watched(0, 1, step, PLAN, folder, self.notes.append))

    def record(self) -> dict[str, Any]:
        return {"delta": self.delta, "history": self.spent.record()}

    def go_on_from(self, kept: Any) -> None:
        if kept["delta"] != self.delta:
            raise ConfigError("another delta")
        self.spent.restore(kept["history"])

    def go_on_after(self, step: int) -> None:
        self.after = step

    def told(self) -> dict[str, float]:
        return {"epsilon": self.spent.epsilon()}

    def lines(self) -> list[str]:
        return [f"{self.steps} steps"]

    @property
    def steps(self) -> int:
        return sum(self.spent.history.values())

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.spent.add(0.1, 1.0)
            self.ledger.after_step(step, Step(0.0, 0.1, None, 0.0), 1.0)


def test_steps_after_the_last_checkpoint_that_were_shown_count(tmp_path: Path) -> None:
    first = Run(tmp_path)
    assert first.after == -1 and first.notes == ["0 steps"] and not (tmp_path / FILE).exists()
    first.train(1, 5)                                         # 3: a line of metrics, 4: an evaluation; it is killed in step 5
    again = Run(tmp_path, step=0)                             # and begins at a checkpoint of step 0
    assert again.steps == 4 and again.after == 0 and again.notes == ["4 steps"]
    again.train(1, 10)
    assert again.ledger.finish(10) == {"privacy": again.record()} and again.steps == 14
    assert Run(tmp_path, step=10).steps == 14


@pytest.mark.parametrize("text", ["", "{", "3", '{"delta": 1e-5}', '{"delta": 1e-5, "history": [[0.1, 1.0]]}',
                                  '{"delta": 1e-5, "history": [[0.1, 1.0, -3]]}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="the record of what the run has spent of privacy is damaged"):
        Run(tmp_path, step=5)


def test_another_claim_is_refused_in_its_own_words(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 3)
    with pytest.raises(ConfigError, match="another delta"):
        Run(tmp_path, step=3, delta=1e-6)


def test_a_run_without_a_folder_keeps_no_record() -> None:
    run = Run(None)                                           # type: ignore[arg-type]
    run.train(1, 3)
    assert run.steps == 3
