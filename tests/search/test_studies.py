"""Studies on real ranks: each trial has the bits of a run of its own, and a study those of any number of groups."""

from __future__ import annotations

import itertools
import json
import tomllib

import pytest
from launch import ROOT
from runs import record, train
from standing import mpirun
from studies import STUDY, journal, lines, told
from trees import zone

from mpitrain.checkpoint.store import ALONE
from mpitrain.cli import main
from mpitrain.energy.report import NOT_YET
from mpitrain.errors import OutputError
from mpitrain.search.cost import joules_of
from mpitrain.search.study import best_of, refuse_unshared


def search(n, file, *words):
    return mpirun(n, "-m", "mpitrain", "search", file, *words, cwd=file.parent, timeout=120)


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    return path


def test_a_study_is_the_same_on_any_number_of_groups_and_its_trials_are_runs(tmp_path, study):
    for n in (1, 2, 4):
        result = search(n, study, f"run.out=on-{n}")
        assert result.rc == 0, result.err
    one, two, four = (told(tmp_path / f"on-{n}") for n in (1, 2, 4))
    assert one == two == four
    assert one["reached"] == {"1": 9, "2": 3, "4": 1} and one["front"] == [one["best"]["trial"]]
    assert {line["group"] for line in journal(tmp_path / "on-4") if line["kind"] == "result"} == {0, 1, 2, 3}
    steps = 11                                                # of an epoch: 1,438 rows in batches of 128
    assert one["samples"] == 128 * steps * (6 * 1 + 2 * 2 + 1 * 4)
    assert train(1, tmp_path / "on-4" / "best.toml", "--quiet", f"run.out={tmp_path / 'at-once'}").rc == 0
    trial = tmp_path / "on-4" / "trials" / f"{one['best']['trial']:04d}"
    at_once = record(tmp_path / "at-once")
    assert at_once["parameters_sha256"] == record(trial)["parameters_sha256"] == one["best"]["parameters_sha256"]
    assert lines(trial) == lines(tmp_path / "at-once") and len(lines(trial)) == 5 + 4
    paused = next(t for t in one["trials"] if t["state"] == "paused")
    assert record(tmp_path / "on-4" / "trials" / f"{paused['trial']:04d}")["status"] == "paused"


def test_ranks_of_a_trial_change_no_bit_where_the_layout_does_not_count(tmp_path, study):
    few = ("search.trials=2", "search.pruner=none", "search.rungs=[1]", "train.epochs=1", "train.reproducible=layout",
           "train.micro_batches=6")
    for n in (1, 3):
        result = search(n, study, f"run.out=on-{n}", f"search.ranks={n}", *few)
        assert result.rc == 0, result.err
    one, three = (told(tmp_path / f"on-{n}") for n in (1, 3))
    assert one == three and len({trial["parameters_sha256"] for trial in one["trials"]}) == 2


@pytest.mark.parametrize("mesh", ["pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_a_trial_that_fails_alike_ends_alone(tmp_path, study, mesh):
    study.write_text(STUDY.replace("[3e-3, 0.3]", "[1e-2, 1e12]").replace('order = "fixed"', ""))
    result = search(2, study, "search.ranks=2", f"mesh.{mesh}=2", "search.pruner=none", "search.rungs=[1]", "train.epochs=1",
                    "search.trials=6", "run.out=study")
    assert result.rc == 0, result.err
    found = told(tmp_path / "study")
    states = [trial["state"] for trial in found["trials"]]
    assert states.count("failed") == found["failed"]["E_NAN"] >= 2 and states.count("finished") >= 1, states
    assert all("optimizer.lr" in trial["message"] for trial in found["trials"] if trial["state"] == "failed")
    finished = next(t for t in found["trials"] if t["state"] == "finished")
    folder = tmp_path / "study" / "trials" / f"{finished['trial']:04d}"
    assert train(2, folder / "config.toml", "--quiet", f"run.out={tmp_path / 'alone'}").rc == 0
    assert record(tmp_path / "alone")["parameters_sha256"] == finished["parameters_sha256"]


BLOCKS = """
from mpitrain import nn

def make(wrong: int, inputs: int, hidden: list, outputs: int):
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs)) if wrong else nn.Linear(65, 10),
                         *(nn.Linear(11 if i == wrong else 10, 10) for i in range(1, 6)))
"""


def test_a_trial_whose_stages_do_not_all_fit_ends_alone_whichever_stage_it_is(tmp_path, study):
    (tmp_path / "blocks.py").write_text(BLOCKS)
    start = STUDY.index("[space]")
    study.write_text(STUDY[:start] + '[space]\n"model.wrong" = {choices = [0, 1, 2, 3, 4, 5, 6]}\n')
    pipeline = ("mesh.pp=3", "mesh.schedule=interleaved", "mesh.chunks=2", "train.micro_batches=3", "model.name=blocks.py:make")
    result = search(3, study, *pipeline, "search.ranks=3", "search.sampler=grid", "search.trials=7", "search.pruner=none",
                    "search.rungs=[1]", "train.epochs=1", "run.out=study")
    assert result.rc == 0, result.err
    states = {trial["values"]["model.wrong"]: trial for trial in told(tmp_path / "study")["trials"]}
    assert {wrong: trial["state"] for wrong, trial in states.items()} == {**dict.fromkeys(range(6), "failed"), 6: "finished"}
    assert all(trial["code"] == "E_SHAPE" and "Linear" in trial["message"] for trial in states.values() if "code" in trial)


REFUSED = [
    (2, ("search.ranks=3",), 78, "search.ranks = 3 does not divide the 2 ranks of this job (these do: 1, 2)"),
    (1, ("search.objective=[\"accuracy\",\"-J\"]",), 78, "-J cannot be an objective while energy.source"),
    (1, ("search.objective=[\"-ms\"]", "log.every=12"), 78, "set log.every to 11 or less"),
    (2, ("model.init_from=nothing",), 66, "no trial of this study can begin, whatever its values: model.init_from names neither"),
    (2, ("search.ranks=2", 'log.observers=["own.py:None"]'), 78, "whatever its values: observer"),
    (2, ("search.ranks=2", "mesh.pp=2", "model.inputs=32"), 65, "whatever its values: the model cannot take samples of shape"),
]


@pytest.mark.parametrize(("n", "words", "status", "said"), REFUSED)
def test_what_a_study_cannot_have_is_refused_in_a_line(study, n, words, status, said):
    result = search(n, study, *words)
    assert result.rc == status and len(result.error_lines) == 1, result.err
    assert said in result.error_lines[0], result.error_lines
    assert said.startswith("set log.every") or not (study.parent / "runs").exists()


def test_all_trials_failed_says_the_commonest_code(tmp_path, study):
    study.write_text(STUDY.replace("[3e-3, 0.3]", "[1e12, 1e13]"))
    result = search(1, study, "search.trials=3")
    assert result.rc == 79 and "E_NAN" in result.error_lines[0], result.err
    assert "all 3 trials failed, 3 of them with E_NAN" in result.error_lines[0]
    assert json.loads((tmp_path / "runs" / "study" / "study.json").read_text())["failed"] == {"E_NAN": 3}


def test_costs_are_objectives_and_unknown_joules_are_refused(tmp_path, study):
    few = ("search.trials=3", "search.rungs=[1]", "train.epochs=1", "search.order=free", 'model.activation="tanh"')
    (tmp_path / "nothing").mkdir()
    unknown = search(2, study, *few, 'search.objective=["accuracy","-J"]', "energy.source=auto", "energy.root=nothing")
    assert unknown.rc == 78 and "joules of" in unknown.error_lines[0] and "are unknown" in unknown.error_lines[0], unknown.err
    result = search(2, study, *few, 'search.objective=["accuracy","-ms","-J","-parameters","-flops"]', "energy.source=model",
                    "energy.idle_watts=20", "energy.busy_watts=80", "energy.period_ms=5")
    assert result.rc == 0, result.err
    found = json.loads((tmp_path / "runs/study/study.json").read_text())
    for trial in found["trials"]:
        sizes = [64, *trial["values"]["model.hidden"], 10]
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        values = trial["results"]["1"]
        assert (values["parameters"], values["flops"]) == (weights + sum(sizes[1:]), 2 * weights)
        joules = [line["joules"] for line in lines(tmp_path / f"runs/study/trials/{trial['trial']:04d}") if "joules" in line]
        assert values["ms"] > 0 and 0.5 * sum(joules) / 2 <= values["J"] <= 2 * sum(joules) / 2, (values, joules)
    assert set(found["front"]) <= {0, 1, 2} and found["front"]


METER = """
from pathlib import Path

from mpitrain.cli import main
from mpitrain.train import Observer
from trees import set_joules

ZONE = Path("powercap/intel-rapl:0")


class Meter(Observer):
    '''A processor that uses 2 J a step. Of trial 1 it shows nothing until step 6, of 2 never, of 3 it dies before step 5.'''

    def begin(self, run):
        self.trial, self.used = int(run.folder.name), int((ZONE / "energy_uj").read_text()) / 1e6
        if self.trial == 2:                                   # the study is in the midst of its work
            for words in ((), ("--html", "seen.html")):
                assert main(["inspect", str(run.folder.parents[1]), *words]) == 0

    def before_step(self, step):
        self.used += 2.0
        if self.trial == 0 or self.trial == 1 and step >= 6 or self.trial == 3 and step < 5:
            set_joules(ZONE, self.used)
        elif self.trial == 3:
            (ZONE / "energy_uj").write_text("gone")
"""


def test_a_counter_that_moves_late_counts_and_one_that_does_not_ends_its_trial_alone(tmp_path, study):
    (tmp_path / "meter.py").write_text(METER)
    (tmp_path / "trees.py").write_text((ROOT / "tests/energy/trees.py").read_text())
    zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 1000.0, 1_000_000_000_000)
    result = search(1, study, "search.trials=4", "search.rungs=[1]", "train.epochs=1", 'search.objective=["-J"]', "log.every=2",
                    "energy.source=powercap", "energy.root=powercap", 'log.observers=["meter.py:Meter"]')
    assert result.rc == 0, result.err
    found = told(tmp_path / "runs/study")
    assert [trial["state"] for trial in found["trials"]] == ["finished", "finished", "failed", "failed"], found["trials"]
    assert [trial["results"]["1"]["J"] for trial in found["trials"][:2]] == pytest.approx([22.0, 22.0], rel=0.1)
    assert "3 of 4 trials have started, 2 finished, 1 running" in result.out and "</html>" in (tmp_path / "seen.html").read_text()
    messages = [trial["message"] for trial in found["trials"][2:]]
    assert "unknown: its counter has not moved in 11 steps; set energy.source" in messages[0], messages
    assert "unknown: its counter is lost before step 6" in messages[1], messages


def test_the_best_trial_is_told_in_values_that_a_file_takes():
    values = {"comm.compress": "", "train.shuffle": True, "model.hidden": [16], "optimizer.lr": 0.5}
    said = best_of({"best": {"trial": 3, "values": values}})
    assert said == 'best: trial 3 (comm.compress = "", train.shuffle = true, model.hidden = [16], optimizer.lr = 0.5)'
    assert tomllib.loads(said.partition("(")[2].rstrip(")").replace(", ", "\n"))["optimizer"]["lr"] == 0.5


def test_joules_of_lines_are_those_of_all_their_samples():
    def line(step, joules, samples, source="measured (powercap)"):
        return {"step": step, "joules": joules, "joules_per_sample": joules / samples if joules is not None else None,
                "energy_source": source}
    late = line(2, None, 1, NOT_YET)
    assert joules_of([line(2, 4.0, 20), line(4, 0.0, 20), line(6, 8.0, 20)], 10) == pytest.approx(12 / 60)
    assert joules_of([late, line(4, 8.0, 40)], 10) == joules_of([line(2, 4.0, 20), line(4, 4.0, 20)], 10) == pytest.approx(0.2)
    assert joules_of([late], 10) is None is joules_of([line(2, 4.0, 20), line(4, None, 20, "unknown")], 10)


def test_a_trial_that_would_not_fit_or_cannot_be_is_its_own_failure(tmp_path, study):
    study.write_text(STUDY.split("[space]")[0] + """[space]
"model.hidden" = {choices = [[16], [4000000, 4000000]]}
"train.batch_size" = {choices = [128, 100000]}
"data.drop_last" = {choices = [false, true]}
""")
    result = search(2, study, "search.ranks=2", "search.sampler=grid", "search.trials=0", "search.rungs=[1]", "train.epochs=1",
                    "train.batch_size=1000000", "model.hidden=[1000000]")        # which some values of [space] mend
    assert result.rc == 0, result.err
    found = told(tmp_path / "runs/study")
    codes = [trial.get("code") for trial in found["trials"]]
    assert codes[:3] == [None] * 3 and codes[4] == "E_MEMORY" and codes[3] not in (None, "E_MEMORY"), found["trials"]
    assert "MiB are free" in found["trials"][4]["message"] and found["failed"][codes[3]] >= 1


def test_a_study_of_a_federation_compares_its_trials_after_rounds(tmp_path, study, capsys):
    study.write_text(STUDY.replace("momentum = 0.9\n", "").replace("epochs = 4\n", "").replace("[1, 2, 4]", "[2, 6]")
                     .replace("trials = 9", "trials = 3").replace("[search]", "[workers]\ncount = 20\neach_round = 4\n[search]")
                     .split("[space]")[0] + '[space]\n"workers.count" = {integer = [5, 60]}\n')
    result = search(2, study, "run.out=found")
    assert result.rc == 0, result.err
    found = told(tmp_path / "found")
    assert found["reached"] == {"2": 3, "6": 1} and found["unit"] == "rounds" and not found["failed"], found
    assert train(1, tmp_path / "found/best.toml", "--quiet", f"run.out={tmp_path / 'at-once'}").rc == 0
    assert record(tmp_path / "at-once")["parameters_sha256"] == found["best"]["parameters_sha256"]
    assert main(["inspect", str(tmp_path / "found")]) == 0
    assert "rungs of 2, 6 rounds" in (said := capsys.readouterr().out) and "best after 6 rounds: trial" in said


def test_hosts_that_share_no_folder_are_named(tmp_path):
    class Control:
        rank, size = 0, 2

        def gather_objects(self, value):
            return [value, False]
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(OutputError, match="node2 cannot see the journal that node1 has begun; set run.out"):
        refuse_unshared(tmp_path / "journal.jsonl", Control(), ["node1", "node2"])
    refuse_unshared(tmp_path / "journal.jsonl", ALONE, ["node1"])
