"""Samplers against their formulas, another library, and themselves after a restart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acted import ACCURACY, SMALL, accuracy, decisions, study_file

from mpitrain.errors import ConfigError
from mpitrain.search.decisions import replayed
from mpitrain.search.evolution import Evolution
from mpitrain.search.pruners import Asha, Unpruned
from mpitrain.search.replay import replay
from mpitrain.search.samplers import SAMPLERS, Grid, QuasiRandom, drawn, draws
from mpitrain.search.sobol import LARGEST, sobol
from mpitrain.search.space import read_space
from mpitrain.search.study_file import read_study
from mpitrain.search.table import Table, Trial, result


def job(trial: Any, reached: int, rung: int) -> tuple[dict[str, float], float]:
    return {"accuracy": accuracy(trial, rung)}, 1.0


def test_sobol_points_are_those_of_scipy() -> None:
    qmc = pytest.importorskip("scipy.stats.qmc")
    assert np.array_equal([sobol(LARGEST, n) for n in range(256)], qmc.Sobol(LARGEST, scramble=False).random(256))


def test_qmc_decides_what_scipys_points_say() -> None:
    qmc = pytest.importorskip("scipy.stats.qmc")
    points = qmc.Sobol(3, scramble=False).random(64)
    for number, (a, b, c) in enumerate(points):
        values = QuasiRandom(SMALL, 7).ask(Table((1,), ACCURACY, 64), number).values
        assert values == {"optimizer.lr": pytest.approx(1e-4 * 1000**a), "model.hidden": [[16], [32], [64]][int(3 * b)],
                          "train.batch_size": 32 + 32 * int(8 * c)}


def test_a_grid_has_every_combination_once() -> None:
    grid, table = Grid(SMALL, 0, points=4), Table((1,), ACCURACY, 96)
    found = [grid.ask(table, number).values for number in range(grid.size())]
    assert grid.size() == 4 * 3 * 8 == len({str(values) for values in found})
    assert sorted({values["optimizer.lr"] for values in found}) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert [found[i]["train.batch_size"] for i in range(8)] == list(range(32, 257, 32))          # the last key changes fastest


def test_random_search_is_uniform_in_each_scale_and_keyed_by_seed_and_number() -> None:
    sampler, table = SAMPLERS["random"](SMALL, 3), Table((1,), ACCURACY, 2000)
    lr = np.log10([sampler.ask(table, n).values["optimizer.lr"] for n in range(2000)])
    counts = np.histogram(lr, bins=8, range=(-4, -1))[0]
    assert np.sum((counts - 250) ** 2 / 250) < 24.3                       # chi-squared with 7 degrees of freedom, 0.1 %
    assert sampler.ask(table, 5) == SAMPLERS["random"](SMALL, 3).ask(Table((9,), ACCURACY, 7), 5)
    assert sampler.ask(table, 5) != SAMPLERS["random"](SMALL, 4).ask(table, 5)


def test_evolution_mutates_one_key_of_the_best_of_a_tournament_of_the_youngest() -> None:
    """Worked out beside it, from the paper's text and the same random numbers."""
    made = decisions(Unpruned(), sampler="evolution", trials=60, parents=12, tournament=4)
    ended, _ = replay(made, 1, job)
    trials = made.table.trials
    assert [end.trial.id for end in ended] == list(range(60))
    assert [trial.values for trial in trials[:12]] == [drawn(SMALL, 0, n) for n in range(12)]
    for child in trials[12:]:
        young = trials[child.id - 12:child.id]
        some = [young[i] for i in draws(0, child.id).permutation(12)[:4]]
        parent = max(some, key=lambda trial: accuracy(trial, 2))
        assert sum(child.values[key] != parent.values[key] for key in parent.values) == 1
    assert max(accuracy(trial, 2) for trial in trials) > max(accuracy(trial, 2) for trial in trials[:12])


def test_evolution_tries_no_point_twice_while_there_are_others() -> None:
    space = read_space({"a.b": {"choices": list(range(6))}, "a.c": {"choices": list(range(6))}})
    made = decisions(Unpruned(), sampler="evolution", trials=36, space=space, parents=3, tournament=2)
    replay(made, 2, lambda trial, reached, rung: ({"accuracy": trial.values["a.b"] + trial.values["a.c"]}, 1.0))
    assert len(made.table.asked) > 25                 # random search has 23 of 36 points after as many draws


def test_evolution_compares_rungs_before_scores() -> None:
    table = Table((1, 3), ACCURACY, 9)
    sampler = Evolution(SMALL, 0, parents=2, tournament=2)
    for number, (rung, value) in enumerate([(0, 0.9), (1, 0.5)]):
        table.apply({"kind": "start", "trial": number, "rung": rung, "values": sampler.ask(table, number).values})
        table.apply(result(number, rung, {"accuracy": value}))
    child = sampler.ask(table, 2).values
    assert sum(child[key] != table.trials[1].values[key] for key in child) == 1


def test_a_trial_is_as_old_as_its_first_result() -> None:
    made = decisions(Asha(), sampler="evolution", trials=30, parents=6, tournament=2)
    replay(made, 1, job)
    assert made.table.told == list(range(30)) and len(made.table.rungs[1]) > 5


@pytest.mark.parametrize("sampler", ["random", "qmc", "grid", "evolution"])
def test_whoever_asks_after_a_restart_gets_the_same(sampler: str) -> None:
    arguments = {"parents": 5, "tournament": 2} if sampler == "evolution" else {}
    first = decisions(Asha(), sampler=sampler, **arguments)
    _, records = replay(first, 3, job)
    for stop in range(0, len(records), 7):
        again = replayed(decisions(Asha(), sampler=sampler, **arguments), records[:stop])
        action, new = again.next()
        assert new == records[stop:stop + len(new)] or records[stop]["kind"] == "result"


def test_optunas_samplers_are_told_the_journal(tmp_path: Path) -> None:
    """A sampler that has been told everything by another process asks for the same; TPE finds better points than chance."""
    pytest.importorskip("optuna")
    study = read_study(study_file(tmp_path), ["search.sampler=optuna:TPESampler", "search.n_startup_trials=6"])
    made = study.decisions()
    _, records = replay(made, 1, job)
    stop = next(i for i, record in enumerate(records) if record["kind"] == "start" and record["trial"] == 20)
    again = replayed(read_study(study.file, ["search.sampler=optuna:TPESampler", "search.n_startup_trials=6"]).decisions(),
                     records[:stop])
    assert again.next()[1] == [records[stop]]
    whole = read_study(study.file, ["search.sampler=optuna:TPESampler", "search.n_startup_trials=6",
                                    "search.pruner=none"]).decisions()
    replay(whole, 1, job)
    scores = [accuracy(trial, 0) for trial in whole.table.trials]
    assert np.mean(scores[-12:]) > np.mean(scores[:6]) + 0.05


@pytest.mark.parametrize("more", [(), ("search.order=fixed",),
                                  ("search.sampler=optuna:NSGAIISampler", "search.population_size=3"),
                                  ('search.objective=["accuracy", "-parameters"]',)])
def test_what_optuna_has_in_memory_is_what_a_study_of_its_own_would_be_told(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Trials pause, go on and fail between two asks; the reference is told all of them anew, by Optuna's own storage."""
    optuna = pytest.importorskip("optuna")
    made = read_study(study_file(tmp_path), ["search.sampler=optuna:TPESampler", "search.trials=40", *more])
    sampler: Any = made.sampler
    ask, asked = sampler.ask, list[int]()

    def compared(table: Table, number: int) -> Any:
        study = optuna.create_study(directions=["maximize"] * len(made.objectives), sampler=sampler.made(number))
        for told in filter(None, (sampler.told(trial, table) for trial in table.trials)):
            study.add_trial(told)
        trial = study.ask(sampler.distributions)
        found = ask(table, number)
        asked.append(number)
        assert found.values == {key: sampler.value(key, trial.params[key]) for key in found.values}
        assert dict(found.attributes) == dict(study.get_trials()[-1].system_attrs)
        return found
    sampler.ask = compared

    def results(trial: Trial, reached: int, rung: int) -> Any:
        values = {"accuracy": accuracy(trial, rung), "parameters": sum(trial.values["model.hidden"])}
        return "E_NAN" if trial.id % 7 == 3 and rung else values, 1.0 + 0.1 * (trial.id % 3)
    replay(made.decisions(), 3, results)
    assert asked == list(range(40))


def test_optuna_notes_on_trials_are_in_the_journal(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    asked = ["search.sampler=optuna:NSGAIISampler", "search.population_size=4", "search.trials=12",
             'search.objective=["accuracy", "-parameters"]', "search.pruner=none"]
    made = read_study(study_file(tmp_path), asked).decisions()
    _, records = replay(made, 1, lambda trial, reached, rung: ({"accuracy": accuracy(trial, rung),
                                                               "parameters": trial.values["model.hidden"][0]}, 1.0))
    starts = [record for record in records if record["kind"] == "start"]
    generations = [record["attributes"]["NSGAIISampler:generation"] for record in starts]
    assert generations[0] == 0 and max(generations) >= 2                 # it knows from the journal which one it breeds


@pytest.mark.parametrize(("name", "told"), [("TPESampel", 'did you mean "TPESampler"?'),
                                            ("BaseSampler", "unknown sampler of Optuna")])
def test_an_unknown_sampler_of_optuna_is_refused(tmp_path: Path, name: str, told: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(ConfigError) as error:
        read_study(study_file(tmp_path), [f"search.sampler=optuna:{name}"])
    assert told in str(error.value)


def test_a_sampler_whose_package_is_missing_is_a_line(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    if importlib.util.find_spec("cmaes"):
        pytest.skip("cmaes is installed")
    with pytest.raises(ConfigError) as error:
        replay(read_study(study_file(tmp_path), ["search.sampler=optuna:CmaEsSampler"]).decisions(), 1, job)
    assert "No module named 'cmaes'" in str(error.value)


def test_without_optuna_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError) as error:
        read_study(study_file(tmp_path), ["search.sampler=optuna:TPESampler"])
    assert 'pip install "mpitrain[search]"' in str(error.value)


OWN = """
def mine(space, history, number, seed):
    assert all(set(trial) == {"id", "values", "state", "rung", "results"} for trial in history)
    values = space.at([0.5] * len(space))
    return {**values, "train.batch_size": 32 + 32 * (len(history) % 8)}
def wrong(space, history, number, seed):
    return {"optimizer.lr": 1.0}
"""


def test_a_sampler_of_ones_own_is_a_function_of_space_history_number_and_seed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = read_study(study_file(tmp_path), ["search.sampler=own.py:mine"]).decisions()
    replay(made, 2, job)
    assert [trial.values["train.batch_size"] for trial in made.table.trials[:3]] == [32, 64, 96]
    with pytest.raises(ConfigError) as error:
        read_study(study_file(tmp_path), ["search.sampler=own.py:wrong"]).decisions().next()
    assert 'search.sampler "own.py:wrong" gave' in str(error.value)
