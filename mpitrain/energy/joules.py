"""Joules of a run from what it has left in its folder, for whoever compares runs: a search whose objective they are, a report.

    run.json         "energy": the whole run, once it is done
    metrics.jsonl    "joules" of each line: since the line before, null where they are unknown

Which of several batch sizes, or other choices, is best is a question of what counts: joules, time, or both. `cost` is Zeus's
(You, Chung, Chowdhury, 2208.06102), in joules: eta 1 asks for energy alone, 0 for time alone.

    cost = eta * joules to the target + (1 - eta) * most watts * seconds to the target
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpitrain.energy.report import NOT_YET, UNKNOWN
from mpitrain.errors import UsageError

Choice = TypeVar("Choice")


class JoulesOfRun(NamedTuple):
    """None where they are unknown, which is not 0; `at_least`: some host or device was not counted. `source` says measured or
    estimated, and how: two runs are to be compared only where it is the same kind."""

    joules: float | None
    joules_per_sample: float | None
    at_least: bool
    source: str


NONE = JoulesOfRun(None, None, False, UNKNOWN)


def joules_of_run(folder: Path) -> JoulesOfRun:
    """Those of a run that is done, or so far; `NONE` where nothing was counted."""
    found = _record(folder).get("energy")
    if found is not None:
        return JoulesOfRun(found["joules"], found["joules_per_sample"], found["at_least"], found["source"])
    lines = [line for line in _lines(folder) if line.get("energy_source") != NOT_YET]
    if not lines or any(line.get("joules") is None for line in lines):
        return NONE
    used, samples = (sum(line["joules"] for line in lines), sum(_samples(line) for line in lines))
    least = any("at least" in line["energy_source"] for line in lines)
    return JoulesOfRun(used, used / samples if samples else None, least, lines[-1]["energy_source"])


def joules_to(folder: Path, metric: str, target: float, *, higher: bool = True) -> float | None:
    """Joules until an evaluation had a metric of at least `target` (at most, where less is better); None: it never had, or they
    are unknown."""
    used: float | None = 0.0
    waits = False                                             # nothing has moved since the beginning
    for line in _lines(folder, evaluations=True):
        if line.get("split") == "validation":
            value = line.get(metric)
            if value is not None and (value >= target if higher else value <= target):
                return None if waits else used
        elif line.get("energy_source") == NOT_YET:
            waits = True
        else:
            joules, waits = line.get("joules"), False
            used = None if used is None or joules is None else used + joules
    return None


def cost(joules: float | None, seconds: float, *, eta: float, most_watts: float) -> float:
    """Zeus's cost of a run to its target; `most_watts` are those of the hosts at full load. UsageError for unknown joules, where
    they count, and for an eta that is no share."""
    if not 0 <= eta <= 1:
        raise UsageError(f"eta is the share that energy has in the cost, 0 to 1, found {eta:g}")
    if joules is None and eta > 0:
        raise UsageError("the cost needs joules, and those of this run are unknown; set eta to 0, or name an energy.source that "
                         "counts them")
    return eta * (joules or 0.0) + (1 - eta) * most_watts * seconds


def cheapest(tried: Mapping[Choice, tuple[float | None, float]], *, eta: float, most_watts: float) -> Choice:
    """The choice, a batch size say, whose (joules, seconds) to the target cost least; of equal ones the first."""
    if not tried:
        raise UsageError("nothing was tried, so nothing is cheapest; give the joules and seconds of one choice or more")
    return min(tried, key=lambda choice: cost(*tried[choice], eta=eta, most_watts=most_watts))


def _samples(line: dict[str, Any]) -> float:
    return float(line["joules"] / line["joules_per_sample"]) if line["joules_per_sample"] else 0.0


def _record(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) and found.get("status") == "done" else {}


def _lines(folder: Path, *, evaluations: bool = False) -> Iterator[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.is_file() else ():
        line = json.loads(text)
        if evaluations or "split" not in line:
            yield line
