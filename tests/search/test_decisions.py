"""Decisions of a study: the same on any number of groups, and after a kill at any record."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from acted import ACCURACY, SMALL, accuracy, decisions, summary

from mpitrain.errors import CheckpointError, ConfigError, NumericsError
from mpitrain.search.decisions import Decisions, replayed
from mpitrain.search.pruners import PRUNERS, Asha, Done, New, Promote, Start, Wait
from mpitrain.search.replay import replay
from mpitrain.search.table import Table, failure, lost_jobs, result

KINDS = [("asha", "random"), ("asha", "evolution"), ("halving", "random"), ("asha-stop", "evolution"), ("median", "qmc"),
         ("none", "evolution")]


def new(pruner: str, sampler: str, ahead: int, trials: int = 30) -> Decisions:
    arguments = {"parents": 6, "tournament": 3} if sampler == "evolution" else {}
    return decisions(PRUNERS[pruner](), sampler=sampler, trials=trials, ahead=ahead, **arguments)


def job(seed: int) -> Any:
    """Results depend on trial and rung alone, durations on the seed; one trial in seven fails."""
    random = np.random.default_rng(seed)

    def run(trial: Any, reached: int, rung: int) -> Any:
        return "E_NAN" if trial.id % 7 == 6 else {"accuracy": accuracy(trial, rung)}, float(random.exponential())
    return run


@pytest.mark.parametrize(("pruner", "sampler"), KINDS)
def test_a_fixed_order_gives_the_same_study_on_any_number_of_groups(pruner: str, sampler: str) -> None:
    found = []
    for groups, seed in ((1, 0), (2, 1), (4, 2), (4, 3), (9, 4)):
        made = new(pruner, sampler, 5)
        replay(made, groups, job(seed))
        found.append(summary(made.table))
    assert all(other == found[0] for other in found)


def test_without_it_who_is_faster_matters() -> None:
    """So the test above can fail."""
    found = []
    for groups, seed in ((1, 0), (4, 2)):
        made = new("asha", "evolution", 0)
        replay(made, groups, job(seed))
        found.append(summary(made.table))
    assert found[0] != found[1]


def test_as_many_groups_as_are_ahead_have_work() -> None:
    made, started = new("asha", "random", 5), 0
    while isinstance(made.next()[0], Start):
        started += 1
    assert started == 5 and isinstance(made.next()[0], Wait)
    made.apply(result(1, 0, {"accuracy": 0.5}))
    assert isinstance(made.next()[0], Wait)                           # trial 0 ends first, whoever is faster
    made.apply(result(0, 0, {"accuracy": 0.5}))
    assert isinstance(made.next()[0], Start)


def test_results_are_seen_in_the_order_in_which_acted_workers_would_end() -> None:
    """Worked out by hand: three workers, a quarter promoted; a start lasts 1 tick, and a promotion from 1 to 4 epochs 3."""
    made = decisions(Asha(4), trials=20, rungs=(1, 4), ahead=3)
    seen: list[tuple[int, int]] = []
    see = made.seen.apply                                                                   # type: ignore[attr-defined]

    def watched(record: Any) -> None:
        if record["kind"] == "result":
            seen.append((record["trial"], record["rung"]))
        see(record)
    made.seen.apply = watched                                                               # type: ignore[attr-defined]
    replay(made, 2, lambda trial, reached, rung: ({"accuracy": 1.0 - trial.id / 9}, float(trial.id % 3 + 1)))
    # Tick 1: 0, 1, 2 end; 3, 4, 5 start. Tick 2: they end; of four results 0 is the best and goes on, until 5; 6, 7 start.
    # Tick 3: they end; 8 starts, and of eight results 1 is among the best two, and goes on until 6. Tick 4: 8 ends, 9 starts.
    # Tick 5: 0 ends, decided before 9, which ends then, too. Tick 6: 1 ends, decided before the others.
    assert seen[:12] == [*((trial, 0) for trial in range(9)), (0, 1), (9, 0), (1, 1)]


@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize(("pruner", "sampler"), KINDS)
def test_a_study_killed_at_any_record_loses_no_result_and_runs_nothing_twice(pruner: str, sampler: str, ahead: int) -> None:
    first = new(pruner, sampler, ahead)
    _, records = replay(first, 3, job(0))
    for stop in range(0, len(records), 5):
        before = records[:stop]
        again = replayed(new(pruner, sampler, ahead), before)
        lost = lost_jobs(again.table)
        for record in lost:
            again.apply(record)
        running = [(record["trial"], record["rung"]) for record in lost]
        _, after = replay(again, 2, job(stop))
        everything = [*before, *lost, *after]
        outcomes = Counter((r["trial"], r["rung"]) for r in everything if r["kind"] in ("result", "fail"))
        assert set(outcomes.values()) == {1} and not again.table.open
        assert [(r["trial"], r["rung"]) for r in after if r["kind"] == "again"] == running
        if ahead:
            assert summary(again.table) == summary(first.table)
        third = replayed(new(pruner, sampler, ahead), everything)          # the journal of both rebuilds the end
        assert summary(third.table) == summary(again.table) and isinstance(third.next()[0], Done)


def test_lost_jobs_come_first_and_know_where_they_go_on() -> None:
    made = decisions(Asha(2), trials=4)
    made.next()
    made.next()
    made.apply(result(0, 0, {"accuracy": 0.9}))
    made.apply(result(1, 0, {"accuracy": 0.8}))
    assert made.next()[0] == Promote(made.table.trials[0], 1)
    assert isinstance(made.next()[0], Start)
    for record in lost_jobs(made.table):
        made.apply(record)
    assert made.next()[0] == Promote(made.table.trials[0], 1, again=True)
    assert made.next()[0] == Start(made.table.trials[2], 0, again=True)
    assert made.next()[0] == Start(made.table.trials[3], 0)


@pytest.mark.parametrize("record", [
    {"kind": "result", "trial": 0, "rung": 1, "values": {"accuracy": 1.0}},
    {"kind": "result", "trial": 7, "rung": 0, "values": {}},
    {"kind": "start", "trial": 2, "rung": 0, "values": {}}, {"kind": "start", "trial": 1, "rung": 9, "values": {}},
    {"kind": "promote", "trial": 0, "rung": 1}, {"kind": "stop", "trial": 0, "rung": 0}, {"kind": "again", "trial": 0, "rung": 0},
    {"kind": "later"}, {}, {"kind": "fail", "trial": 0}])
def test_a_record_that_does_not_follow_is_damage(record: dict[str, Any]) -> None:
    table = Table((1, 3), ACCURACY, 3)
    table.apply({"kind": "start", "trial": 0, "rung": 0, "values": {"a.b": 1}})
    with pytest.raises(CheckpointError):
        table.apply(record)


def test_a_journal_decided_otherwise_is_damage() -> None:
    made = new("asha", "random", 2)
    for number in range(2):
        made.apply({"kind": "start", "trial": number, "rung": 0, "values": SMALL.at([0.5] * 3), "seen": 0})
    with pytest.raises(CheckpointError):
        made.apply({"kind": "start", "trial": 2, "rung": 0, "values": SMALL.at([0.5] * 3), "seen": 1})


def test_a_study_whose_trials_all_failed_says_the_commonest_code() -> None:
    table = Table((1,), ACCURACY, 3)
    for number, code in enumerate(("E_NAN", "E_SHAPE", "E_NAN")):
        table.apply({"kind": "start", "trial": number, "rung": 0, "values": {"a.b": number}})
        table.apply(failure(number, 0, code, f"why {number}"))
    with pytest.raises(NumericsError) as error:
        table.refuse_all_failed()
    assert "all 3 trials failed, 2 of them with E_NAN" in str(error.value) and "Trial 0: why 0" in str(error.value)
    assert error.value.exit_code == 79
    table = Table((1,), ACCURACY, 3)
    table.apply({"kind": "start", "trial": 0, "rung": 0, "values": {"a.b": 1}})
    table.refuse_all_failed()


class Says:
    """A pruner of a user's that says always the same."""

    eta = 3

    def __init__(self, choice: Any):
        self.choice = choice

    def decide(self, table: Table) -> Any:
        return self.choice(table) if callable(self.choice) else self.choice


@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("choice, why", [
    (None, "expected New, Promote"), (New, "expected New, Promote"), (Wait(), "no trial is running"),
    (New(7), "rungs are 0 to 2"),
    (lambda table: Promote(table.trials[0], 1) if table.trials else New(), "trial 0 to rung 1, and the trial is not paused"),
    (New(), "all 5 trials have started")])
def test_a_pruner_that_no_study_can_follow_is_refused(ahead: int, choice: Any, why: str) -> None:
    said = Says((lambda table: New) if choice is New else choice)
    made = decisions(said, trials=5, ahead=ahead)
    with pytest.raises(ConfigError, match=f"search.pruner: Says.decide returned .*{why}"):
        for _ in range(6):
            made.next()
