"""The lines of `plan`, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from planned import MACHINE, MEASURED

from mpitrain.config import load_config
from mpitrain.errors import ConfigError, DataError, MeshError, MissingError, MpitrainError, UsageError
from mpitrain.plan.inspect import inspect_config
from mpitrain.plan.planner.command import plan_lines
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.shortage import frugal

pytestmark = pytest.mark.usefixtures("counted")


def test_the_command_prints_lines_that_run_and_writes_json(folder: Path, tmp_path: Path) -> None:
    lines = list(plan_lines(folder / "gpt.toml", ["train.batch_size=12"], ranks="4", machine=str(folder / "made-up.toml"), top=2,
                            json_file=tmp_path / "plans.jsonl"))
    plans = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert [plan["place"] for plan in plans] == [1, 2]
    for plan in plans:
        assert sum(seconds for part, seconds in plan["seconds"].items() if part != "total") == pytest.approx(
            plan["seconds"]["total"])
        command = f"mpirun -n 4 python -m mpitrain train {folder / 'gpt.toml'} train.batch_size=12 {' '.join(plan['overrides'])}"
        assert f"{plan['place']}: {command}" in lines
        assert plan["samples_per_s"] == pytest.approx(12 / plan["seconds"]["total"])
        assert 0 < plan["efficiency"] <= 1.01
        assert plan["memory"]["bytes"] == max(stage["pool"] for stage in plan["memory"]["stages"]) <= plan["memory"]["limit"]
    said = "\n".join(lines)
    assert "compute: assumed: 50% of the peak of made-up" in said and "joules: estimated by the machine file made-up" in said


def test_what_was_not_measured_or_beside_other_load_is_said_in_each_plan(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "busy.toml"
    path.write_text(MACHINE.replace("ranks = 4", "ranks = 0").rpartition("[[levels]]")[0] % "" + "cores = 2\n".join(
        MEASURED.partition("[measured.between]")[0].replace("by_ranks.8", "by_ranks.2").replace("turns = 1.0", "turns = 6.2")
        .partition("nodes = 2\n")[::2]))
    for given in ("4", "2..4"):
        lines = list(plan_lines(folder / "gpt.toml", [], ranks=given, machine=str(path), json_file=tmp_path / "plans.jsonl"))
        for part in ("compute", "tensor, bubble, exposed", "update", "stragglers"):
            assert next(one for one in lines if one.startswith(f"{part}: ")).endswith(
                "; fitted on 2 ranks of a host, 4 were never measured")
        assert any(one.startswith("calibration: 2 ranks took 6.2 times their processor time") for one in lines), lines
        plans = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
        assert all(plan["rests_on"]["calibration"].startswith("2 ranks took 6.2") for plan in plans)
        assert all(("never measured" in plan["rests_on"]["compute"]) == (plan["ranks"] == 4) for plan in plans)


def test_a_range_of_ranks_is_a_curve(folder: Path, tmp_path: Path) -> None:
    lines = list(plan_lines(folder / "gpt.toml", [], ranks="3..8", machine=str(folder / "slow.toml"),
                            json_file=tmp_path / "curve.jsonl"))
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [point["ranks"] for point in points] == [3, 4, 8] and {point["place"] for point in points} == {1}
    assert [line.split()[0] for line in lines[2:5]] == ["3", "4", "8"]
    assert "joules: unknown: the machine file has no watts" in lines and "unknown" in lines[2]
    seconds = [point["seconds"]["total"] for point in points]
    assert all(point["efficiency"] <= 1.01 for point in points) and seconds[0] > seconds[1]


def test_where_nothing_fits_it_is_said_what_takes_the_memory_and_how_many_ranks_would_do(folder: Path, gpt: Problem) -> None:
    enough = min(need.memory for need in frugal(gpt, 4))
    assert enough < min(need.memory for need in frugal(gpt, 2))
    path = folder / "narrow.toml"
    path.write_text(MACHINE.replace("1e9", str(enough)) % ("", 1e-8))
    with pytest.raises(MeshError) as told:
        list(plan_lines(folder / "gpt.toml", [], ranks="2", machine=str(path)))
    assert "no mesh of 2 ranks holds this model" in told.value.message and "activations" in told.value.message
    needed = int(told.value.message.split("; ")[-1].split()[0])
    assert 2 < needed <= 4
    assert any(need.memory <= enough for need in frugal(gpt, needed))
    assert not any(need.memory <= enough for n in range(3, needed) for need in frugal(gpt, n))


WRONG: list[tuple[str, list[str], str, type[MpitrainError], str]] = [
    ("0", [], "made-up.toml", UsageError, "--ranks must be at least 1, found 0"),
    ("-2", [], "made-up.toml", UsageError, 'found "-2"'),
    ("many", [], "made-up.toml", UsageError, "--ranks is a number, or two with .. between them"),
    ("1000000000", [], "made-up.toml", UsageError, "--ranks is at most 1048576, more than any machine has; found 1000000000"),
    ("1..1048577", [], "made-up.toml", UsageError, "--ranks is at most 1048576"),
    ("9" * 5000, [], "made-up.toml", UsageError, "--ranks is at most 1048576"),
    ("8..2", [], "made-up.toml", UsageError, "write 2..8"),
    ("2..4..8", [], "made-up.toml", UsageError, "--ranks is a number, or two"),
    ("6", [], "made-up.toml", ConfigError, '6 ranks do not fill the 4 places of each "host" of machine made-up; give 4 or 8'),
    ("2..6", [], "made-up.toml", ConfigError, "6 ranks do not fill the 4 places"),
    ("6", [], "one-host.toml", ConfigError, '6 ranks are more than the 4 of machine made-up, whose last level is "host"'),
    ("8", [], "one-host.toml", ConfigError, '8 ranks are more than the 4 of machine made-up, whose last level is "host"'),
    ("4", [], "dgx-a10", MissingError, 'did you mean "dgx-a100"'),
    ("4", [], "nowhere.toml", MissingError, "expected a machine file"),
    ("4", ["mesh.site=2"], "made-up.toml", ConfigError, "plan does not know runs with mesh.site"),
    ("4", ["comm.compress=int8"], "made-up.toml", ConfigError, "plan does not know runs with comm.compress"),
    ("4", ["train.precision=float64"], "made-up.toml", ConfigError, "has no flops of float64"),
]


@pytest.mark.parametrize(("ranks", "keys", "machine", "kind", "words"), WRONG)
def test_bad_input_is_one_line(folder: Path, ranks: str, keys: Sequence[str], machine: str, kind: type[MpitrainError],
                               words: str) -> None:
    with pytest.raises(kind) as told:
        list(plan_lines(folder / "gpt.toml", keys, ranks=ranks,
                        machine=str(folder / machine) if machine.endswith(".toml") else machine))
    assert words in told.value.message and "\n" not in told.value.message


@pytest.mark.parametrize(("old", "new", "words"), [
    ("beta = 1e-08", "", 'beta of level "net"'), ("alpha = 1e-5", "alpha = -1e-5", "0 or more"),
    ("memory_bandwidth = 1e10", "memory_bandwidth = -1", "above 0"), ("efficiency", "efficency", "efficency")])
def test_a_wrong_machine_file_is_one_line(folder: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (folder / "made-up.toml").read_text()
    assert old in text
    (tmp_path / "wrong.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as told:
        list(plan_lines(folder / "gpt.toml", [], ranks="4", machine=str(tmp_path / "wrong.toml")))
    assert words in told.value.message and told.value.file == str(tmp_path / "wrong.toml")


def test_a_model_that_cannot_take_the_samples_is_refused_as_inspect_does(folder: Path) -> None:
    path = folder / "mlp.toml"
    path.write_text('[model]\nname = "mlp"\ninputs = 7\nhidden = [4]\noutputs = 10\n[data]\npath = "digits"\n'
                    '[train]\nsteps = 4\n')
    said, machine = [], str(folder / "made-up.toml")
    for lines in (plan_lines(path, [], ranks="4", machine=machine), inspect_config(load_config(path, []), 4)):
        with pytest.raises(MpitrainError) as told:
            next(lines)
        said.append(str(told.value))
    assert said[0] == said[1] and "the model cannot take samples of shape (1, 8, 8)" in said[0]


def test_a_batch_smaller_than_the_data_parallel_ranks_is_refused(folder: Path) -> None:
    (folder / "one.py").write_text("from mpitrain import nn\n\nclass Model(nn.Module):\n    def __init__(self):\n"
                                   "        self.layer = nn.Linear(64, 10)\n\n    def forward(self, x):\n"
                                   "        return self.layer(x.reshape(len(x), -1))\n")
    (folder / "one.toml").write_text('[model]\nname = "one.py:Model"\n[data]\npath = "digits"\n'
                                     '[train]\nsteps = 2\nbatch_size = 8\n')
    with pytest.raises(MeshError, match=r"train.batch_size = 8 is smaller than the data-parallel ranks: .* has 16 or more"):
        list(plan_lines(folder / "one.toml", [], ranks="16", machine=str(folder / "made-up.toml")))


def test_joules_are_unknown_where_a_machine_has_one_of_its_watts_alone(folder: Path) -> None:
    (folder / "half.toml").write_text((folder / "slow.toml").read_text().replace("name =", "busy_watts = 100.0\nname =", 1))
    lines = list(plan_lines(folder / "gpt.toml", [], ranks="2", machine=str(folder / "half.toml"), top=1))
    assert "joules: unknown: the machine file has no idle_watts" in lines and lines[2].split()[-1] == "unknown"


def test_files_that_are_no_use_are_refused_before_anything_is_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.plan.planner.command.Problem", None)        # nothing is even opened
    (folder / "clocks.csv").write_text("stage,instruction,frequency,time\n")
    for name, kind in (("nowhere.csv", MissingError), ("clocks.csv", DataError)):
        with pytest.raises(kind, match="table of clocks"):
            next(plan_lines(folder / "gpt.toml", [], ranks="2", machine=str(folder / "slow.toml"), energy=folder / name))
    for path in (folder, folder / "nowhere" / "plans.jsonl"):
        with pytest.raises(UsageError, match="--json takes a file to write, in a folder that is there; found"):
            next(plan_lines(folder / "gpt.toml", [], ranks="2", machine=str(folder / "slow.toml"), json_file=path))
