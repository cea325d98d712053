"""Runs that count their joules: what their files have, what they tell, what they refuse; and that others know nothing of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, clean_environment
from runs import lines, ok, record, refused, steps, write
from standing import train
from trees import zone

from mpitrain.energy.joules import joules_of_run

METER = '''
from pathlib import Path
from mpitrain.train import Observer
from trees import set_joules

ZONE = Path("powercap/intel-rapl:0")


class Meter(Observer):
    """A processor that uses 2 J a step; `dies` is the step after which its counter shows text."""

    dies = 1000

    def begin(self, run):
        self.rank = run.rank

    def after_step(self, step, fields, seconds):
        if self.rank == 0 and step < self.dies:
            set_joules(ZONE, int((ZONE / "energy_uj").read_text()) / 1e6 + 2.0)
        elif self.rank == 0:
            (ZONE / "energy_uj").write_text("gone")


class Dying(Meter):
    dies = 5
'''
SHORT = ("train.steps=12", "train.eval_every=6", "log.every=2", "run.out=a")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "meter.py").write_text(METER)
    (tmp_path / "trees.py").write_text(Path(__file__).parents[1].joinpath("energy/trees.py").read_text())
    zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 999_990.0, 1_000_000_000_000)
    return write(tmp_path)


def test_joules_are_in_every_line_and_in_the_record_and_change_no_result(config: Path) -> None:
    plain = ok(train(2, config, *SHORT, "run.out=plain"))
    counted = ok(train(2, config, *SHORT, "energy.source=powercap", "energy.root=powercap", "log.observers=['meter.py:Meter']",
                       "energy.carbon_g_per_kwh=FR", "energy.pue=1.5", "energy.idle_watts=1.0"))
    folder, other = config.parent / "a", config.parent / "plain"
    assert record(folder)["parameters_sha256"] == record(other)["parameters_sha256"]
    assert [line["loss"] for line in steps(folder)] == [line["loss"] for line in steps(other)]
    assert "energy" not in plain.out and "joules" not in steps(other)[0] and "energy" not in record(other)
    assert [round(line["joules"], 3) for line in steps(folder)] == [2.0] + [4.0] * 5, "the meter moves after a step is counted"
    assert all(line["joules_per_sample"] == pytest.approx(line["joules"] / 96) for line in steps(folder))
    assert {line["energy_source"] for line in steps(folder)} == {"measured (powercap)"}
    energy = record(folder)["energy"]
    assert energy["joules"] == pytest.approx(24.0, abs=1e-3) and energy["at_least"] is False and energy["samples"] == 12 * 48
    assert energy["by_host"][0]["parts"] == {"package-0": pytest.approx(24.0, abs=1e-3)} and energy["by_host"][0]["ranks"] == 2
    assert energy["carbon"]["grams"] == pytest.approx(24.0 / 3.6e6 * 1.5 * 56, rel=1e-3) and energy["carbon"]["country"] == "FR"
    assert energy["baseline"]["joules"] + energy["baseline"]["above"] == pytest.approx(24.0, abs=1e-3)
    assert "energy is measured (powercap), read every 50 ms" in counted.out
    assert re.search(r"^energy: 24 J \(measured \(powercap\)\), 41\.67 mJ a sample, [\d.,]+ W.*; 0\.00056 g CO2e at 56 g/kWh and "
                     r"a PUE of 1\.5$", counted.out, re.MULTILINE), counted.out
    found = joules_of_run(folder)
    assert (found.joules, found.source) == (energy["joules"], "measured (powercap)")


def test_a_counter_that_dies_in_the_middle_is_null_from_there_on(config: Path) -> None:
    result = ok(train(2, config, *SHORT, "energy.source=auto", "energy.root=powercap", "log.observers=['meter.py:Dying']",
                      "energy.carbon_g_per_kwh=400"))
    folder = config.parent / "a"
    assert [None if line["joules"] is None else round(line["joules"]) for line in steps(folder)] == [2, 4] + [None] * 4
    assert [line["energy_source"] for line in steps(folder)] == ["measured (powercap)"] * 2 + ["unknown"] * 4
    energy = record(folder)["energy"]
    assert energy["joules"] is None and energy["carbon"] is None and energy["by_host"][0]["known"]["joules"] >= 6.0
    told = [line for line in result.out.splitlines() if "energy unknown" in line]
    assert len(told) == 2 and told[0].startswith("step 6  energy unknown from here on:") and 'found "gone"' in told[0]
    assert joules_of_run(folder).joules is None


def test_a_run_that_goes_on_adds_up_what_was_used_before(config: Path) -> None:
    keys = ("energy.source=powercap", "energy.root=powercap", "log.observers=['meter.py:Meter']")
    ok(train(1, config, *SHORT, *keys, "train.steps=6", "optimizer.schedule=constant"))
    ok(train(1, config, *SHORT, *keys, "--resume", "optimizer.schedule=constant"))
    energy = record(config.parent / "a")["energy"]
    assert energy["joules_before"] == pytest.approx(10.0, abs=1e-3), "the last step is not in the lines yet"
    assert energy["joules"] == pytest.approx(10.0 + 12.0, abs=1e-3) and energy["samples"] == 6 * 48
    assert sum(line["joules"] for line in steps(config.parent / "a")) == pytest.approx(20.0, abs=1e-3)


def numbers_of(value: Any, name: str = "") -> list[str]:
    """The names of a record's numbers of energy."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numbers_of(inner, key)]
    if isinstance(value, list):
        return [found for inner in value for found in numbers_of(inner, name)]
    return [name] if isinstance(value, float) else []


def test_an_estimate_is_called_so_wherever_it_is_told(config: Path) -> None:
    result = ok(train(2, config, *SHORT, "train.steps=60", "energy.source=model", "energy.idle_watts=60", "energy.busy_watts=180",
                      "energy.carbon_g_per_kwh=DE", "energy.period_ms=5"))
    folder = config.parent / "a"
    words = "estimated from 60 W idle, 180 W busy"
    told = [line for line in result.out.splitlines() if re.search(r"energy|CO2|\d m?k?J\b|\d W\b", line)]
    assert len(told) == 2 and all("estimated" in line for line in told), told
    assert re.search(r"^energy: estimated [\d.,]+ k?J \(estimated from .*; estimated [\d.e-]+ g CO2e", told[1])
    assert all(line["energy_source"] == words and line["joules"] > 0 for line in steps(folder))
    energy = record(folder)["energy"]
    assert energy["source"] == energy["carbon"]["source"] == words
    assert 60 * 0.9 < energy["joules"] / energy["by_host"][0]["seconds"] < 180 * 1.1
    assert [(host["source"], list(host["parts"])) for host in energy["by_host"]] == [(words, [words])]
    assert joules_of_run(folder).source == words
    assert set(energy["by_phase"]) >= {"forward", "backward", "update", "evaluation"}
    assert sum(part["joules"] for part in energy["by_phase"].values()) == pytest.approx(energy["joules"], rel=0.2)


def test_where_nobody_counts_it_is_unknown_and_never_zero(config: Path) -> None:
    (config.parent / "empty").mkdir()
    result = ok(train(2, config, *SHORT, "energy.source=auto", "energy.root=empty", "energy.carbon_g_per_kwh=DE"))
    folder = config.parent / "a"
    assert {(line["joules"], line["joules_per_sample"], line["watts"], line["energy_source"]) for line in steps(folder)} == {
        (None, None, None, "unknown")}
    energy = record(folder)["energy"]
    assert [energy[key] for key in ("joules", "joules_per_sample", "watts", "by_phase", "carbon", "baseline")] == [None] * 6
    assert energy["source"] == "unknown" and "expected the counter of a processor package" in energy["by_host"][0]["why"]
    assert result.out.count("energy unknown: expected the counter of a processor package") == 2      # at the start and at the end


@pytest.mark.parametrize(("keys", "status", "words"), [
    (("energy.root=nowhere", "energy.source=auto"), 66,
     ("E_MISSING", 'file="nowhere"', "expected a folder of energy counters", "leave energy.root out")),
    (("energy.root=powercap/empty", "energy.source=powercap"), 66, ("expected a folder", 'set energy.source = "auto"')),
    (("energy.source=powercap", "energy.root=spoiled"), 65, ("E_DATA", 'expected a number of microjoules, found "12 J"')),
    (("energy.source=nvml",), 78, ("E_CONFIG", "nvidia-ml-py", "mpitrain[nvml]")),
    (("energy.source=auto", "energy.period_ms=1"), 78, ("energy.period_ms must lie between 5 and 10000",)),
    (("energy.source=model",), 78, ("energy.idle_watts is 0",))])
def test_what_is_wrong_is_told_in_one_line_before_the_first_step(keys: tuple[str, ...], status: int, words: tuple[str, ...],
                                                                 config: Path) -> None:
    (zone(config.parent / "spoiled", "intel-rapl:0", "package-0") / "energy_uj").write_text("12 J")
    refused(train(2, config, *SHORT, *keys), status, *words)


def test_a_run_without_energy_imports_nothing_of_it_and_reads_no_clock_for_it(config: Path) -> None:
    """The timeline gives its spans to nobody. What puts back the limits of killed runs is imported where one has left any."""
    program = ("import sys; from mpitrain.train.build import assembly, from_config; from mpitrain import run, verbs, cli; "
               "from mpitrain.parallel.gradients.timeline import Timeline, no_span; "
               "assert Timeline().listener is no_span and Timeline().span('compute', 'forward 0') is no_span('', ''); "
               "from mpitrain.cli import main; main(['train', 'run.toml', 'train.steps=2', '--quiet'])\n")
    after = ("\nimport atexit\n"
             "atexit.register(lambda: print('imported', [name for name in sys.modules if name.endswith('observers.energy') or "
             "('mpitrain.energy.' in name and name.rpartition('.')[2] not in ('guardian', 'knobs'))], flush=True))\n")
    (config.parent / "program.py").write_text("import sys" + after + program)
    done = subprocess.run([sys.executable, "program.py"], cwd=config.parent, capture_output=True, text=True, timeout=60,
                          env={**clean_environment(), "PYTHONPATH": str(ROOT)})
    assert "imported []" in done.stdout, done.stdout + done.stderr
    assert json.loads((config.parent / "runs/run/run.json").read_text())["status"] == "done"
    assert "joules" not in lines(config.parent / "runs/run")[0]
