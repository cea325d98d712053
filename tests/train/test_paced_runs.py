"""Federations whose workers do not wait for each other: one order of arrival gives one set of bits, wherever workers train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import DIGITS, many, ok, record, steps, train, write

from mpitrain.checkpoint import store
from mpitrain.config import load_config
from mpitrain.config.federated import MOST_SPREAD
from mpitrain.errors import MpitrainError
from mpitrain.parallel.workers.paced import Seated, Server
from mpitrain.schedules.arrivals import Clock, Pace
from mpitrain.train.build import paced
from mpitrain.train.build.inputs import open_data
from mpitrain.train.build.paced import PacedFederation

FEDERATION = DIGITS + """
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.0
[train]
steps = 4
batch_size = 20
eval_every = 2
[workers]
count = 12
each_round = 6
rows = "dirichlet:0.5"
arrival = "simulated"
in_flight = 3
[checkpoint]
every = 1
[log]
every = 1
progress_s = 0
[[sync]]
over = "workers"
every = "1 epochs"
lr = 0.5
"""
KILLER = """
import os, signal
from mpitrain.train.observers.observer import Observer

class Killer(Observer):
    def begin(self, run):
        self.doomed = run.rank == 1 and run.step == 0

    def before_step(self, step):
        if self.doomed and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
TOGETHER = 'sync.levels=[{over="workers", every="1 epochs", lr=1.0}]'


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("paced")
    write(folder, FEDERATION)
    (folder / "killer.py").write_text(KILLER)
    return folder, many(folder, (3, "run.toml", "run.out=s3"), (1, "run.toml", "run.out=s1"),
                        (3, "run.toml", "run.out=r3", "workers.arrival=recorded"),
                        (2, "run.toml", "run.out=r2", "workers.arrival=r3/arrivals.jsonl"),
                        (2, "run.toml", "run.out=all", "workers.in_flight=6", "workers.buffer=6", "train.steps=1", TOGETHER),
                        (2, "run.toml", "run.out=together", "workers.arrival=", "workers.in_flight=4", "train.steps=1", TOGETHER),
                        timeout=120)


def sha(found: dict[str, Any]) -> str:
    return str(found["parameters_sha256"])


def arrivals(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "arrivals.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_a_clock_gives_the_same_bits_on_any_number_of_ranks(results: Any) -> None:
    folder, found = results
    assert sha(found[0]) == sha(found[1])
    assert arrivals(folder / "s3") == arrivals(folder / "s1")
    lines = arrivals(folder / "s3")
    assert [line["round"] for line in lines] == [k // 6 + 1 for k in range(24)]
    assert max(line["staleness"] for line in lines) > 0
    for line in steps(folder / "s3"):
        own = [one["staleness"] for one in lines if one["round"] == line["step"]]
        assert line["staleness"] == pytest.approx(sum(own) / 6) and line["versions"] == 6


def test_a_record_of_real_arrivals_is_repeated_to_the_bit_on_other_ranks(results: Any) -> None:
    folder, found = results
    assert sha(found[2]) == sha(found[3])
    assert arrivals(folder / "r3") == arrivals(folder / "r2")


def test_a_first_round_in_which_rank_0_trains_nobody_is_no_model_without_gradients(results: Any) -> None:
    """Rank 0 applies what two others train, and all of them know which parameters gradients have reached."""
    folder, found = results
    ok(train(3, folder / "run.toml", "run.out=two", "workers.in_flight=2", "train.steps=1"))
    ok(train(1, folder / "run.toml", "run.out=one", "workers.in_flight=2", "train.steps=1"))
    assert sha(record(folder / "two")) == sha(record(folder / "one"))


def test_all_at_once_in_one_buffer_is_federated_averaging(results: Any) -> None:
    folder, _ = results
    one, other = (store.load(folder / run / "checkpoints/step-00000001") for run in ("all", "together"))
    names = [name for name in one.arrays if name.startswith("parameters/")]
    assert names
    for name in names:
        np.testing.assert_allclose(one.read(name), other.read(name), rtol=1e-5, atol=1e-6)


def test_a_rank_killed_in_a_round_ends_the_job_and_the_run_goes_on_to_the_same_bits(results: Any) -> None:
    folder, found = results
    killed = train(3, folder / "run.toml", "run.out=cut", 'log.observers=["killer.py:Killer"]')
    assert killed.rc != 0 and len(killed.error_lines) <= 1, killed.err
    with (folder / "cut/arrivals.jsonl").open("a") as file:
        file.write('{"round": 3, "turn": 0, "wor')              # as a rank leaves it that is killed while it writes
    ok(train(2, folder / "run.toml", "run.out=cut", "--resume"))
    assert record(folder / "cut")["parameters_sha256"] == sha(found[0])
    assert arrivals(folder / "cut") == arrivals(folder / "s3")


def test_results_count_less_the_later_they_are() -> None:
    """Rank 0 by itself, against the formulas: three workers at once, two results a version."""
    goal, weights, seconds = np.array([3.0, -1.0, 2.0, 5.0]), [0.1, 0.4, 0.3, 0.2], [5.0, 1.0, 2.0, 1.5]
    turns = [Seated(k, k, weight, 1) for k, weight in enumerate(weights)]
    link = SimpleNamespace(rank=0, size=1, finish=lambda: None)
    paced: Any = SimpleNamespace(link=link, policy=SimpleNamespace(step=0), rate=0.5,
                                 pace=Pace(3, 2, 8, 0.5), order_of=lambda round, turns: Clock(seconds))
    server = Server(paced, turns, np.zeros(1))
    server.run(lambda one, start: one.weight * 0.7 * (start - goal[one.worker]))

    v0 = 0.0                              # arrivals: 1 at 1.0, 2 at 2.0 -> v1; 3 (began at 1.0, from v0) at 2.5, 0 at 5.0 -> v2
    change = {k: 4 * weights[k] * 0.7 * (v0 - goal[k]) for k in range(4)}
    v1 = v0 - 0.5 / 2 * (change[1] + change[2])
    v2 = v1 - 0.5 / 2 * (change[3] + change[0]) / math.sqrt(2.0)
    assert [line["turn"] for line in server.lines] == [1, 2, 3, 0]
    assert [line["staleness"] for line in server.lines] == [0, 0, 1, 1]
    np.testing.assert_allclose(server.theta, v2, rtol=1e-12)


def test_speeds_of_the_widest_spread_are_numbers_whose_sums_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for drawn in (0, 2**64 - 1):                              # the fastest and the slowest of all workers there can be
        monkeypatch.setattr(paced, "key", lambda *words, drawn=drawn: drawn)
        assert 0 < paced.speed(0, 0, MOST_SPREAD) < math.inf
        assert math.isfinite(paced.speed(0, 0, MOST_SPREAD) * 2**64)


REFUSED = [
    ("workers.arrival=nowhere.jsonl", 'is neither "simulated" nor "recorded", and no record can be read there'),
    ("workers.in_flight=0", "workers.in_flight must be at least 1, found 0"),
    ("workers.staleness=-1", "workers.staleness must be at least 0, found -1"),
    ("workers.discount=-0.5", "workers.discount must"),
    ("workers.spread=1e9", "workers.spread must be at most 50, found 1e+09"),
    ("workers.correct=scaffold", 'workers.correct = "scaffold", which adds up over a round; set it to "" or "prox:0.1"'),
    ('sync.levels=[{over="workers", outer="fedadam"}]', '[[sync]] outer = "fedadam", a rule for the mean of a round'),
    ("workers.arrival=bad.jsonl", "line 1 must be an object with round, turn, worker, version and factor, found '[3]'"),
    ("workers.arrival=short.jsonl", "round 1 has 1 arrivals, and 6 workers train in it; take the data, seed, [workers]"),
]


@pytest.mark.parametrize("key, words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, key: str, words: str) -> None:
    write(tmp_path, FEDERATION)
    (tmp_path / "bad.jsonl").write_text("[3]\n")
    (tmp_path / "short.jsonl").write_text('{"round": 1, "turn": 0, "worker": 0, "version": 0, "factor": 1.0}\n')
    with pytest.raises(MpitrainError) as caught:
        PacedFederation(load_config(tmp_path / "run.toml", [key]), open_data("digits"))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("changed", ["run.seed=7", "workers.staleness=1", "workers.discount=0.25", "workers.in_flight=2",
                                     "workers.buffer=2", "train.steps=5"])
def test_a_record_of_another_run_is_refused(results: Any, changed: str) -> None:
    folder, _ = results
    with pytest.raises(MpitrainError, match="that wrote this record"):
        PacedFederation(load_config(folder / "run.toml", ["workers.arrival=s3/arrivals.jsonl", changed]), open_data("digits"))
