"""Pruners against the algorithms of their papers, and against Optuna's on one recorded order of reports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acted import ACCURACY, accuracy, decisions, study_file

from mpitrain.search.front import Objective
from mpitrain.search.pruners import PRUNERS, Asha, AshaStop, Done, Halving, Median, Promote, Start, Stop, Stopping, Unpruned, Wait
from mpitrain.search.replay import replay
from mpitrain.search.study_file import read_study
from mpitrain.search.table import FAILED, FINISHED, PAUSED, STOPPED, Table, result

RUNGS = (1, 3, 9, 27)


def job(trial: Any, reached: int, rung: int) -> tuple[dict[str, float], float]:
    return {"accuracy": accuracy(trial, rung)}, 1.0 + trial.id % 5


def states(table: Table) -> dict[str, int]:
    found = [trial.state for trial in table.trials]
    return {state: found.count(state) for state in sorted(set(found))}


def by_algorithm_2(table: Table, eta: int) -> tuple[int, int] | None:
    """get_job of 1810.05934: (trial, rung that it goes to), or None for a new one at the bottom."""
    for k in range(len(table.rungs) - 2, -1, -1):
        there = [(trial.results[k]["accuracy"], trial.id) for trial in table.trials if k in trial.results]
        candidates = [t for _, t in sorted(there, key=lambda pair: (-pair[0], pair[1]))[:len(there) // eta]]
        promotable = [t for t in candidates if table.trials[t].rung == k]
        if promotable:
            return promotable[0], k + 1
    return None


@pytest.mark.parametrize("eta", [2, 3, 4])
def test_asha_decides_as_algorithm_2_of_the_paper(eta: int) -> None:
    made = decisions(Asha(eta), trials=120, rungs=RUNGS)
    ask, checked, random = made.next, 0, np.random.default_rng(eta)

    def compared() -> Any:
        nonlocal checked
        expected = by_algorithm_2(made.table, eta) if made.table.left else None
        new = made.table.left > 0
        action, records = ask()
        if new:
            checked += 1
            assert (action.trial.id, action.rung) == (expected or (len(made.table.trials) - 1, 0))      # type: ignore[union-attr]
        return action, records
    made.next = compared                                                                    # type: ignore[method-assign]
    replay(made, 5, lambda trial, reached, rung: ({"accuracy": float(random.random())}, float(random.random())))
    assert checked > 120 and states(made.table).keys() == {FINISHED, PAUSED}


def test_synchronous_halving_waits_for_a_rung_and_takes_its_best_third() -> None:
    made = decisions(Halving(3), trials=27, rungs=RUNGS)
    replay(made, 4, job)
    table = made.table
    assert [len(rung) for rung in table.rungs] == [27, 9, 3, 1]
    for rung, above in itertools.pairwise(table.rungs):
        best = sorted(rung.scores, key=lambda trial: -rung.scores[trial][0])[:len(above)]
        assert set(best) == set(above.ids)
    made = decisions(Halving(3), trials=2, rungs=(1, 3))
    first, second = made.next()[0], made.next()[0]
    assert isinstance(first, Start) and isinstance(second, Start) and isinstance(made.next()[0], Wait)
    made.apply(result(0, 0, {"accuracy": 0.5}))
    assert isinstance(made.next()[0], Wait)                           # the other one is not there
    made.apply(result(1, 0, {"accuracy": 0.6}))
    assert made.next()[0] == Promote(made.table.trials[1], 1)


def test_without_a_pruner_every_trial_runs_to_the_end_at_once() -> None:
    made = decisions(Unpruned(), trials=5)
    ended, _ = replay(made, 2, job)
    assert [end.rung for end in ended] == [2] * 5 and states(made.table) == {FINISHED: 5}


def reports(seed: int, n: int = 60) -> Any:
    """(trial, rung, value) in an order of workers that are not equally fast; who is pruned is told by sending True."""
    random = np.random.default_rng(seed)
    running, started = [[0, 0]], 1
    while running:
        if len(running) < 6 and started < n and random.random() < 0.5:
            running.append([started, 0])
            started += 1
            continue
        place = int(random.integers(len(running)))
        trial, rung = running[place]
        value = float(round(random.normal(trial % 7, 3)))                                  # ties among them
        pruned = yield trial, rung, value
        if pruned or rung == len(RUNGS) - 1:
            running.pop(place)
            if not running and started < n:
                running.append([started, 0])
                started += 1
        else:
            running[place][1] += 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["asha-stop", "median"])
def test_stopping_decisions_are_optunas(name: str, seed: int) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    theirs = {"asha-stop": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
              "median": optuna.pruners.MedianPruner(n_startup_trials=5)}[name]
    study = optuna.create_study(direction="maximize", pruner=theirs)
    ours: Stopping = {"asha-stop": AshaStop(3), "median": Median(startup=5)}[name]
    table, trials, kept, order = Table(RUNGS, ACCURACY, 60), dict[int, Any](), list[bool](), reports(seed)
    event = next(order)
    while True:
        trial, rung, value = event
        while len(table.trials) <= trial:
            number = len(table.trials)
            table.apply({"kind": "start", "trial": number, "rung": 0, "values": {"a": number}})
            trials[number] = study.ask()
        trials[trial].report(value, RUNGS[rung])
        table.apply(result(trial, rung, {"accuracy": value}))
        pruned, last = bool(trials[trial].should_prune()), rung == len(RUNGS) - 1       # Optuna's may be NumPy's
        if not last:
            kept.append(not pruned)
            assert ours.keep(table.trials[trial], rung, table) != pruned
            table.apply({"kind": "stop", "trial": trial, "rung": rung} if pruned else
                        {"kind": "promote", "trial": trial, "rung": rung + 1})
        if pruned and not last:
            study.tell(trials[trial], state=optuna.trial.TrialState.PRUNED)
        elif last:
            study.tell(trials[trial], value)
        try:
            event = order.send(pruned and not last)
        except StopIteration:
            break
    assert 10 < sum(kept) < len(kept) - 10                            # both answers were compared


def test_asha_promotes_at_the_highest_rung_first() -> None:
    """Trial 0 may go on to rung 2, and trial 4 to rung 1."""
    table = Table((1, 3, 9), ACCURACY, 8)

    def happens(kind: str, trial: int, rung: int, value: float = 0.0) -> None:
        table.apply({"kind": kind, "trial": trial, "rung": rung, "values": {"accuracy": value}})
    for trial, value in enumerate((0.9, 0.8, 0.7, 0.6)):
        happens("start", trial, 0)
        happens("result", trial, 0, value)
    for trial in (0, 1):
        happens("promote", trial, 1)
        happens("result", trial, 1, 0.9 - trial)
    for trial in (4, 5):
        happens("start", trial, 0)
        happens("result", trial, 0, 0.95)
    assert Asha(2).decide(table) == Promote(table.trials[0], 2)
    happens("promote", 0, 2)
    assert Asha(2).decide(table) == Promote(table.trials[4], 1)


@pytest.mark.parametrize("name", sorted(PRUNERS))
@pytest.mark.parametrize("ahead", [0, 3])
def test_every_study_ends_with_a_trial_at_the_last_rung_whatever_fails(name: str, ahead: int) -> None:
    for trials in (1, 2, 7, 20):
        made = decisions(PRUNERS[name](), trials=trials, rungs=RUNGS, ahead=ahead)
        replay(made, 3, lambda t, reached, rung: ("E_NAN" if t.id % 5 == 3 else {"accuracy": accuracy(t, rung)}, 1.0))
        best = made.table.best()
        assert isinstance(made.next()[0], Done) and len(made.table.trials) == trials and not made.table.open
        assert best is not None and best.reached == made.table.last
        assert states(made.table).get(FAILED, 0) == sum(t % 5 == 3 for t in range(trials))


def test_a_study_whose_trials_all_fail_ends() -> None:
    for name in PRUNERS:
        made = decisions(PRUNERS[name](), trials=9)
        replay(made, 2, lambda trial, reached, rung: ("E_NAN", 1.0))
        assert isinstance(made.next()[0], Done) and states(made.table) == {FAILED: 9}


def test_results_that_are_no_numbers_are_promoted_by_nobody() -> None:
    for name in ("halving", "asha", "asha-stop", "median"):
        made = decisions(PRUNERS[name](), trials=20)
        replay(made, 3, lambda t, reached, rung: ({"accuracy": float("nan") if t.id % 2 else accuracy(t, rung)}, 1.0))
        assert all(trial.reached == 0 for trial in made.table.trials if trial.id % 2) and made.table.best() is not None


OWN = """
from mpitrain.search.pruners import New, Promote, idle
class Two:
    def __init__(self, eta=3, best_of=2):
        self.eta, self.best_of = eta, best_of
    def decide(self, table):
        done = [t for t in table.rungs[0].best(self.best_of) if t not in table.rungs[0].promoted]
        if table.left:
            return New()
        return Promote(table.trials[done[0]], table.last) if done and not table.open else idle(table)
"""


def test_a_pruner_of_ones_own_decides(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = read_study(study_file(tmp_path), ["search.pruner=own.py:Two", "search.best_of=3"]).decisions()
    replay(made, 2, job)
    assert [len(rung) for rung in made.table.rungs] == [27, 0, 3]


def test_stopping_pruners_say_stop_and_go_on_with_the_next() -> None:
    made = decisions(AshaStop(3), trials=4, rungs=(1, 3))
    for number, value in enumerate((0.5, 0.9, 0.1)):
        assert made.next()[0] == Start(made.table.trials[number], 0)
        made.apply(result(number, 0, {"accuracy": value}))
        if number < 2:
            assert made.next()[0] == Promote(made.table.trials[number], 1)
            made.apply(result(number, 1, {"accuracy": value}))
    action, records = made.next()
    assert [record["kind"] for record in records] == ["stop", "start"] and isinstance(action, Start)
    assert made.table.trials[2].state == STOPPED and Stop(made.table.trials[2], 0).rung == 0


def test_several_objectives_are_promoted_by_fronts() -> None:
    """Nobody is promoted while a third of its rung, or more, dominates it."""
    objectives = [Objective("accuracy", higher=True), Objective("ms", higher=False)]
    for name in ("asha", "halving", "asha-stop"):
        made, random = decisions(PRUNERS[name](), trials=60, objectives=objectives), np.random.default_rng(0)
        _, records = replay(made, 4, lambda *_, random=random: (dict(zip(("accuracy", "ms"), random.random(2).tolist())), 1.0))
        table = Table((1, 3, 9), objectives, 60)
        for record in records:
            if record["kind"] == "promote" and len(table.rungs[0]) >= 3 and table.trials[record["trial"]].reached == 0:
                scores = table.rungs[0].scores
                own = scores[record["trial"]]
                above = sum(all(x >= y for x, y in zip(other, own)) and other != own for other in scores.values())
                assert above <= len(scores) // 3
            table.apply(record)
        front = table.front()
        assert front and all(not (a.score > b.score and all(x >= y for x, y in zip(a.score, b.score)))
                             for a in front for b in front)
