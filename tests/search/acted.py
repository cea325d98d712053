"""A study on the built-in digits for tests, and acted jobs for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mpitrain.search.decisions import Decisions, FixedDecisions
from mpitrain.search.front import Objective
from mpitrain.search.samplers import SAMPLERS
from mpitrain.search.space import Space, read_space
from mpitrain.search.table import Table, Trial

RUN = """
[model]
name = "mlp"
inputs = 64
hidden = [32]
outputs = 10
[data]
path = "digits"
[train]
epochs = 9
"""
SEARCH = """
[search]
trials = 27
rungs = [1, 3, 9]
"""
SPACE = """
[space]
"optimizer.lr" = {log = [1e-4, 1e-1]}
"optimizer.weight_decay" = {uniform = [0.0, 0.5]}
"model.hidden" = {choices = [[64], [128, 64]]}
"train.batch_size" = {integer = [32, 256], step = 32}
"""
SMALL: Space = read_space({"optimizer.lr": {"log": [1e-4, 1e-1]}, "model.hidden": {"choices": [[16], [32], [64]]},
                           "train.batch_size": {"integer": [32, 256], "step": 32}})
ACCURACY = [Objective("accuracy", higher=True)]


def study_file(folder: Path, *, run: str = RUN, search: str = SEARCH, space: str = SPACE) -> Path:
    path = folder / "study.toml"
    path.write_text(run + search + space)
    return path


def decisions(pruner: Any, *, sampler: str = "random", trials: int = 27, rungs: tuple[int, ...] = (1, 3, 9), ahead: int = 0,
              space: Space = SMALL, seed: int = 0, objectives: list[Objective] = ACCURACY, **arguments: Any) -> Decisions:
    table, made = Table(rungs, objectives, trials), SAMPLERS[sampler](space, seed, **arguments)
    return FixedDecisions(table, pruner, made, ahead) if ahead else Decisions(table, pruner, made)


def accuracy(trial: Trial, rung: int) -> float:
    """Best at a learning rate of 10^-2.5, and a little better at each rung; a number of its own for each trial."""
    distance = abs(math.log10(trial.values["optimizer.lr"]) + 2.5)
    return 1 - distance / 3 - 1 / (2 + rung) / 10 + 1e-6 * trial.id


def summary(table: Table) -> dict[str, Any]:
    """The state of a study as plain data: equal for equal decisions and results, in whatever order these came."""
    def described(trial: Trial) -> dict[str, Any]:
        results = {str(table.epochs[rung]): trial.results[rung] for rung in sorted(trial.results)}
        failed = {"code": trial.code} if trial.code else {}
        return {"id": trial.id, "values": trial.values, "state": trial.state, "results": results, **failed}
    best = table.best()
    return {"objective": [objective.text for objective in table.objectives], "rungs": list(table.epochs),
            "planned": table.planned, "best": best.id if best else None, "front": [trial.id for trial in table.front()],
            "at_rungs": [len(rung.scores) for rung in table.rungs], "trials": [described(trial) for trial in table.trials]}
