"""study.json: what a study has found, from the records of its journal.

All but `times` is the same on any number of groups with ``order = "fixed"``, as long as no objective is a time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpitrain.search.groups import Groups
from mpitrain.search.shared_table import SharedTable
from mpitrain.search.study_file import Study
from mpitrain.search.table import Record, Table, Trial


def begun(groups: Groups) -> Record:
    """The record of a job that begins to work on a study."""
    return {"kind": "job", "event": "begins", "groups": groups.count, "ranks": groups.world.size, "time": time.time()}


def summary(study: Study, shared: SharedTable, groups: Groups, *, stopped: bool) -> dict[str, Any]:
    """The content of study.json. `shared` is rank 0's, caught up."""
    table, records = shared.decisions.table, shared.records
    samples = samples_of(records)
    best = table.best()
    return {"name": study.base.run.name, "status": "stopped" if stopped else "done",
            "objective": [one.text for one in table.objectives], "rungs": list(table.epochs),
            "unit": table.unit,
            "best": None if best is None else about(best, table, records),
            "front": [trial.id for trial in table.front()],
            "reached": {str(epochs): sum(number in trial.results for trial in table.trials)
                        for number, epochs in enumerate(table.epochs)},
            "failed": dict(sorted(Counter(trial.code for trial in table.trials if trial.code).items())),
            "samples": sum(samples.values()),
            "trials": [{**about(trial, table, records), "samples": samples.get(trial.id, 0)} for trial in table.trials],
            "times": times(table, records, groups, shared.seconds)}


def about(trial: Trial, table: Table, records: Iterable[Record]) -> dict[str, Any]:
    """A trial in plain words: its results by epochs, and the hash of the parameters where it has finished."""
    found: dict[str, Any] = {"trial": trial.id, "values": trial.values, "state": trial.state,
                             "results": {str(table.epochs[rung]): values for rung, values in sorted(trial.results.items())}}
    for record in records:
        if record.get("trial") == trial.id:
            found |= {key: record[key] for key in ("code", "message", "parameters_sha256") if key in record}
    return found


def samples_of(records: Iterable[Record]) -> dict[int, int]:
    """The samples that each trial has trained, by the records of its outcomes. What a killed job lost is not among them."""
    found: dict[int, int] = {}
    for record in records:
        if record["kind"] in ("result", "fail"):
            found[record["trial"]] = max(found.get(record["trial"], 0), record.get("samples", 0))
    return found


def times(table: Table, records: Sequence[Record], groups: Groups, decisions: Sequence[float]) -> dict[str, Any]:
    """Seconds of the study. Utilisation is the part of all ranks' seconds in which they were at work on a trial, and `trained`
    the part in which they trained, evaluated or saved, which is that without set-ups."""
    outcomes = [record for record in records if record["kind"] in ("result", "fail")]
    jobs = jobs_of(records, time.time())
    seconds = sum(job["seconds"] for job in jobs)
    rank_seconds = sum(job["seconds"] * job["ranks"] for job in jobs)
    busy, trained = (sum(record[key] * job["ranks"] / job["groups"] for job in jobs for record in job["outcomes"])
                     for key in ("busy_s", "train_s"))
    best, to_best = table.best(), None
    if best is not None:
        last = next(record for record in reversed(outcomes) if record["trial"] == best.id)
        to_best = _seconds_until(last["time"], jobs)
    set_ups = [record["set_up_s"] for record in outcomes if "set_up_s" in record]
    return {"ranks": groups.world.size, "groups": groups.count, "jobs": len(jobs), "seconds": seconds,
            "utilisation": busy / rank_seconds if rank_seconds else None,
            "trained": trained / rank_seconds if rank_seconds else None, "rank_seconds": rank_seconds,
            "seconds_to_best": to_best, "set_up_s": statistics.median(set_ups) if set_ups else None,
            "decision_s": statistics.median(decisions) if decisions else None}


def jobs_of(records: Sequence[Mapping[str, Any]], now: float) -> list[dict[str, Any]]:
    """The jobs that have worked on a study: `began`, `seconds`, `ranks`, `groups` and `outcomes` of each. One that was killed
    ended with its last record, for all that is known."""
    jobs: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "job" and record["event"] == "begins":
            jobs.append({"began": record["time"], "ended": record["time"], "ranks": record["ranks"],
                         "groups": record["groups"], "outcomes": []})
        elif jobs and "time" in record:
            jobs[-1]["ended"] = max(jobs[-1]["ended"], record["time"])
            if record["kind"] in ("result", "fail"):
                jobs[-1]["outcomes"].append(record)
    if jobs:
        jobs[-1]["ended"] = now
    return [{**job, "seconds": job["ended"] - job["began"]} for job in jobs]


def _seconds_until(moment: float, jobs: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of work on the study before a moment."""
    return float(sum(max(min(moment, job["ended"]) - job["began"], 0.0) for job in jobs))
