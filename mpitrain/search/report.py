"""What a study has come to, from its journal alone: while it runs, when it is done, and after a kill. Needs no MPI.

`inspect` prints it (`report_lines`), and `report_html` draws it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.config.messages import toml
from mpitrain.errors import CheckpointError, MissingError
from mpitrain.search.front import COSTS, Objective
from mpitrain.search.journal import NAME, Journal
from mpitrain.search.spent import spent_of
from mpitrain.search.table import FAILED, Record, Table, Trial

DOWN = ("loss", "rmse", "mse", "mae", "perplexity")           # metrics of which less is better, in journals that do not say it


class Span(NamedTuple):
    """What a group was at work on, in seconds since the study began, waits of jobs in between left out."""

    job: int
    group: int
    trial: int
    rung: int
    start: float
    stop: float
    failed: bool


@dataclass(frozen=True)
class Report:
    """A study's table, and what its journal says besides. `said` tells of a torn last line, or is ""."""

    name: str
    header: Mapping[str, Any]
    table: Table
    records: Sequence[Record]
    said: str
    privacy: Sequence[str] = ()              # what the trials have spent together, in lines

    @property
    def objectives(self) -> Sequence[Objective]:
        return self.table.objectives

    @property
    def keys(self) -> list[str]:
        """The keys of [space], in their order."""
        return list(self.table.trials[0].values) if self.table.trials else []

    def value(self, trial: Trial, objective: Objective, rung: int | None = None) -> float | None:
        """What a trial has measured at a rung (default: the highest it has reached); None where that is no number."""
        found = trial.results.get(trial.reached if rung is None else rung, {}).get(objective.name)
        return float(found) if isinstance(found, (int, float)) and found - found == 0 else None

    def front(self) -> list[Trial]:
        """The Pareto front at the highest rung that any trial has reached, the best of the first objective first."""
        rung = next((rung for rung in reversed(range(len(self.table.rungs))) if self.table.rungs[rung].scores), None)
        if rung is None:
            return []
        from mpitrain.search.front import fronts
        ids = sorted(self.table.rungs[rung].scores)
        scores = [self.table.rungs[rung].scores[i] for i in ids]
        found = [self.table.trials[ids[i]] for i in fronts(scores)[0]]
        return sorted(found, key=lambda trial: (-self.table.rungs[rung].scores[trial.id][0], trial.id))

    def points(self, x: Objective, y: Objective, rung: int) -> list[tuple[float, float, int]]:
        """(x, y, id) of each trial that has both at a rung."""
        pairs = ((self.value(trial, x, rung), self.value(trial, y, rung), trial.id) for trial in self.table.trials)
        return [(a, b, number) for a, b, number in pairs if a is not None and b is not None]

    def failures(self) -> Counter[str]:
        return Counter(trial.code for trial in self.table.trials if trial.state == FAILED)

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of ranks that have worked on it; the last one ended with its last record, for all that the journal says."""
        from mpitrain.search.summary import jobs_of
        times = [record["time"] for record in self.records if "time" in record]
        return jobs_of(self.records, max(times, default=0.0))

    def spans(self) -> list[Span]:
        """Each outcome as the time that its group was at work on it."""
        found, passed = list[Span](), 0.0
        for number, job in enumerate(self.jobs()):
            for record in job["outcomes"]:
                stop = passed + record["time"] - job["began"]
                found.append(Span(number, record.get("group", 0), record["trial"], record["rung"],
                                  max(passed, stop - record.get("busy_s", 0.0)), stop, record["kind"] == "fail"))
            passed += job["seconds"]
        return found

    def utilisation(self) -> float | None:
        """Rank seconds at work over rank seconds; None where no time has passed."""
        jobs = self.jobs()
        seconds = sum(job["seconds"] * job["ranks"] for job in jobs)
        busy = sum(record.get("busy_s", 0.0) * job["ranks"] / job["groups"] for job in jobs for record in job["outcomes"])
        return busy / seconds if seconds else None

    def seconds(self) -> float:
        return float(sum(job["seconds"] for job in self.jobs()))

    def rungs(self) -> Iterator[tuple[int, int, int, float | None, float | None]]:
        """(epochs, trials there, of these gone on, best and median of the first objective) of each rung."""
        first = self.objectives[0]
        for number, (epochs, rung) in enumerate(zip(self.table.epochs, self.table.rungs)):
            values = [value for trial in self.table.trials if (value := self.value(trial, first, number)) is not None]
            best = (max if first.higher else min)(values) if values else None
            yield (epochs, sum(number in trial.results for trial in self.table.trials), len(rung.promoted), best,
                   statistics.median(values) if values else None)

    def best_so_far(self) -> list[tuple[float, float]]:
        """(seconds, the best value of the first objective until then, at any rung), one point for each improvement."""
        first, found = self.objectives[0], list[tuple[float, float]]()
        for span in sorted(self.spans(), key=lambda span: span.stop):
            value = self.value(self.table.trials[span.trial], first, span.rung)
            if value is not None and (not found or (value > found[-1][1] if first.higher else value < found[-1][1])):
                found.append((span.stop, value))
        return found


def is_study_folder(path: Path) -> bool:
    return (path / NAME).is_file()


def read_report(folder: Path) -> Report:
    """MissingError for a folder that is no study's, CheckpointError for a journal that is damaged or of another kind."""
    if not is_study_folder(folder):
        raise MissingError(f"expected the folder of a study, with its {NAME}, of which reports are made; the journal is not "
                           "there: restore it, or look at study.json, best.toml and single runs in trials/", file=folder)
    records, said = Journal(folder / NAME).read()
    header = records[0]
    try:
        how = header["search"]
        directions = header.get("higher") or [not (text.startswith("-") or text in DOWN) for text in how["objective"]]
        objectives = [Objective(text.removeprefix("-"), higher) for text, higher in zip(how["objective"], directions)]
        table = Table(how["rungs"], objectives, header["trials"], how.get("unit", "epochs"))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError("the journal's header does not say what was searched; is it of another version?",
                              file=folder / NAME) from None
    for record in records[1:]:
        table.apply(record)
    spent = spent_of(folder, table.trials)
    return Report(folder.resolve().name, header, table, records[1:], said, () if spent is None else spent["said"])


def shown(value: float | None) -> str:
    """A number in few letters."""
    if value is None:
        return "-"
    if value % 1 == 0 and 100 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def told(value: float | None, objective: Objective) -> str:
    """``accuracy 0.9712``, ``3.1000 ms``."""
    return f"{shown(value)} {objective.name}" if objective.name in COSTS else f"{objective.name} {shown(value)}"


def value_text(value: Any) -> str:
    """A value of [space] as TOML, floats in few letters."""
    return f"{value:.4g}" if isinstance(value, float) else toml(value)


def values_text(trial: Trial) -> str:
    return ", ".join(f"{key} = {value_text(value)}" for key, value in trial.values.items())
