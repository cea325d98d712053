"""Observers: told of everything a run does, in order, on every rank; loud where they fail; from one file of a user's."""

from __future__ import annotations

import json
import signal

import pytest
from runs import record, start, write
from standing import train

from mpitrain.errors import ConfigError
from mpitrain.train import Observer
from mpitrain.train.observers.observer import own_observer

OWN = '''
import json
from mpitrain.train import Observer


class Diary(Observer):
    def begin(self, run):
        self.file = open(run.folder / f"diary-{run.rank}", "w")
        self.note("begin", run.size, run.step, run.plan.steps)

    def note(self, *words):
        print(*words, file=self.file, flush=True)

    def before_step(self, step):
        self.note("before", step)

    def after_step(self, step, fields, seconds):
        self.note("after", step, fields.loss.hex(), fields.lr.hex(), seconds > 0)

    def after_evaluation(self, step, metrics, seconds):
        self.note("evaluated", step, metrics["loss"].hex())

    def before_checkpoint(self, step):
        self.note("saving", step)

    def after_checkpoint(self, step):
        self.note("saved", step)

    def finish(self, step):
        self.note("finish", step)
        return {"diary": step}

    def close(self):
        self.note("close")
        self.file.close()


class Faulty(Diary):
    def after_step(self, step, fields, seconds):
        super().after_step(step, fields, seconds)
        if step == 3 and self.file.name.endswith("-1"):
            raise RuntimeError("the meter is not there")
'''


def diary(run, rank):
    return (run / f"diary-{rank}").read_text().splitlines()


def test_a_users_observer_is_told_of_everything_in_order_on_every_rank(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    arguments = ("train.steps=4", "train.eval_every=2", "checkpoint.every=3", "checkpoint.best=false",
                 "checkpoint.asynchronous=false")
    result = train(2, write(tmp_path), "run.out=a", *arguments, "log.observers=['own.py:Diary']")
    assert result.rc == 0, result.err
    words = [" ".join(line.split()[:2]) for line in diary(tmp_path / "a", 0)]
    assert words == ["begin 2", "before 1", "after 1", "before 2", "after 2", "evaluated 2", "before 3", "after 3", "saving 3",
                     "saved 3", "before 4", "after 4", "evaluated 4", "saving 4", "saved 4", "finish 4", "close"]
    assert diary(tmp_path / "a", 0) == diary(tmp_path / "a", 1)
    assert record(tmp_path / "a")["diary"] == 4
    told = [float.fromhex(line.split()[2]) for line in diary(tmp_path / "a", 0) if line.startswith("after")]
    logged = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert told == [line["loss"] for line in logged if "split" not in line]
    alone = train(2, write(tmp_path), "run.out=b", *arguments)
    assert alone.rc == 0 and record(tmp_path / "b")["parameters_sha256"] == record(tmp_path / "a")["parameters_sha256"]


def test_what_an_observer_raises_on_one_rank_ends_the_job(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    result = train(2, write(tmp_path), "run.out=a", "log.observers=['own.py:Faulty']")
    assert result.rc == 70 and len(result.error_lines) == 1
    assert "rank=1/2" in result.error_lines[0] and "the meter is not there" in result.error_lines[0]
    assert diary(tmp_path / "a", 1)[-1] == "close"


GIVERS = """
import numpy as np
from mpitrain.train import Observer


class Giver(Observer):
    given = None

    def finish(self, step):
        return self.given


class Liar(Giver):
    given = {"parameters_sha256": "lies", "tail": 1}


class Twin(Giver):
    given = {"pair": 1}


class Second(Twin):
    given = {"pair": 2}


class Array(Giver):
    given = {"rates": np.ones(2)}


class List(Giver):
    given = [1, 2]
"""


@pytest.mark.parametrize(("names", "line", "kept"), [
    ("Giver", "", {}), ("Twin", "", {"pair": 1}),
    ("Liar", 'Liar: finish returned "parameters_sha256", which the run or another observer writes; return another name', {}),
    ("Twin Second", 'Second: finish returned "pair", which the run', {"pair": 1}),
    ("Array Twin", "Array: finish returned what run.json cannot hold (Object of type ndarray", {"pair": 1}),
    ("List", "List: finish returned what run.json cannot hold (a list); return a dict", {})])
def test_what_an_observer_may_not_leave_is_left_out_and_it_is_named(tmp_path, names, line, kept):
    (tmp_path / "own.py").write_text(GIVERS)
    arguments = ("train.steps=2", f"log.observers={[f'own.py:{name}' for name in names.split()]}")
    result = train(2, write(tmp_path), "run.out=a", *arguments)
    assert result.rc == (78 if line else 0) and len(result.error_lines) == bool(line), result.err
    assert not line or f"the observer {line}" in result.error_lines[0]
    about = record(tmp_path / "a")
    assert about["status"] == "done" and len(about["parameters_sha256"]) == 64
    assert {name: about[name] for name in ("pair", "tail", "rates") if name in about} == kept


def test_a_run_that_is_stopped_finishes_its_observers(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    job = start(2, write(tmp_path), "run.out=a", "train.steps=100000", "log.observers=['own.py:Diary']")
    job.wait_for("step 20/")
    job.signal(signal.SIGUSR1)
    assert job.finish().rc == 85
    words = [line.split()[0] for line in diary(tmp_path / "a", 1)]
    assert words[-4:] == ["saving", "saved", "finish", "close"]


@pytest.mark.parametrize("name, found", [
    ("speed", 'log.observers names "speed": an observer is your own "package.module:name" or "file.py:name"'),
    ("own.py:Nothing", 'observer "own.py:Nothing": own.py has no "Nothing"'),
    ("own.py:json.loads", 'observer "own.py:json.loads": own.py has no "json.loads"'),
    ("own.py:dict", 'observer "own.py:dict" must give an mpitrain.train.Observer, found a dict')])
def test_what_is_no_observer_is_refused_by_name(tmp_path, name, found):
    (tmp_path / "own.py").write_text(OWN + "\ndict = dict\n")
    with pytest.raises(ConfigError) as caught:
        own_observer(name, tmp_path)
    assert caught.value.message.startswith(found)


def test_an_observer_that_overrides_nothing_does_nothing():
    observer = Observer()
    assert observer.finish(3) == {} and observer.close() is None


def test_a_quiet_run_prints_nothing(tmp_path):
    result = train(2, write(tmp_path), "run.out=a", "train.steps=2", "--quiet")
    assert (result.rc, result.out, result.err) == (0, "", "")
