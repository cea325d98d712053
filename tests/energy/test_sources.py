"""Where joules come from: GPUs by NVML, what a host has, grams by country, what runs have left, and refusals of [energy]."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trees import set_joules, zone

from mpitrain.config import Config, changed
from mpitrain.config.values import check_values
from mpitrain.energy.carbon import grams, intensity, table
from mpitrain.energy.joules import NONE, JoulesOfRun, cheapest, cost, joules_of_run, joules_to
from mpitrain.energy.nvml import Gpus, load
from mpitrain.energy.report import NOT_YET, in_joules, line, together
from mpitrain.energy.sources import Asked, open_counters, source_words
from mpitrain.energy.zones import Lost
from mpitrain.errors import ConfigError, MissingError, UsageError

FAKE = Path(__file__).parent / "fake/pynvml.py"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """NVML of two GPUs whose counters are in the file `mj`."""
    spec = importlib.util.spec_from_file_location("pynvml", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("FAKE_NVML_MJ", str(tmp_path / "mj"))
    (tmp_path / "mj").write_text("[1000000, 5000]")
    return module


def test_gpus_are_counted_from_now_on_and_those_of_the_run_alone(nvml: ModuleType, tmp_path: Path) -> None:
    both, second = Gpus(), Gpus(["0000:65:00.0", "0000:65:00.0"])
    assert both.joules() == second.joules() == 0.0
    (tmp_path / "mj").write_text("[1002500, 5750]")
    assert both.joules() == pytest.approx(3.25) and second.joules() == pytest.approx(0.75)
    assert both.parts() == {"gpu 0 (NVIDIA H200)": 2.5, "gpu 1 (NVIDIA H200)": 0.75}
    (tmp_path / "mj").write_text("[1002500, null]")
    with pytest.raises(Lost, match=r"the counter of gpu 1 \(NVIDIA H200\) cannot be read: error 15"):
        both.joules()
    (tmp_path / "mj").write_text("[1002400, 5750]")
    with pytest.raises(Lost, match="went back from 1,002,500 to 1,002,400 mJ"):
        both.joules()
    with pytest.raises(MissingError, match="NVML counts no energy of this host's GPUs: error 6"):
        Gpus(["0000:99:00.0"])
    both.close()
    both.close()


def test_what_is_asked_of_nvml_has_the_signatures_of_the_package(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByPciBusId",
                 "nvmlDeviceGetName", "nvmlDeviceGetTotalEnergyConsumption"):
        assert list(inspect.signature(getattr(real, name)).parameters) == list(inspect.signature(getattr(nvml, name)).parameters)
    assert real.NVML_ERROR_GPU_IS_LOST == nvml.NVML_ERROR_GPU_IS_LOST and issubclass(real.NVMLError, Exception)


def test_without_the_package_or_the_driver_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType) -> None:
    def no_driver() -> None:
        raise nvml.NVMLError(12)
    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    with pytest.raises(MissingError, match="NVML finds no driver of NVIDIA's: error 12"):
        load()
    monkeypatch.delattr(nvml, "nvmlDeviceGetTotalEnergyConsumption")
    with pytest.raises(ConfigError, match="the module pynvml that is installed has no counter of energy"):
        load()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"needs the package nvidia-ml-py; pip install 'mpitrain\[nvml\]'"):
        load()


def test_processors_and_gpus_are_added_up_and_what_is_not_counted_is_said(nvml: ModuleType, tmp_path: Path) -> None:
    tree = zone(tmp_path / "powercap", "intel-rapl:0", "package-0")
    asked, gpu = Asked("auto", tmp_path / "powercap"), ["0000:17:00.0"]
    opened = open_counters(asked, gpu)
    assert opened.counter is not None and opened.error is None and opened.gap == ""
    (tmp_path / "mj").write_text("[1000500, 5000]")
    set_joules(tree, 1.25)
    assert opened.counter.joules() == pytest.approx(0.75)
    assert source_words(asked, opened.counter.kind) == "measured (powercap, nvml)"
    processors = open_counters(asked, [])
    assert processors.counter is not None and processors.counter.kind == "powercap" and processors.gap == ""
    lost = open_counters(asked, ["0000:99:00.0"])
    assert lost.counter is not None and lost.gap.startswith("the GPUs are not counted: NVML counts no energy")
    gpus = open_counters(Asked("auto", tmp_path / "nothing"), gpu)
    assert gpus.counter is not None and gpus.gap.startswith("the processors are not counted: expected a folder")
    none = open_counters(Asked("powercap", tmp_path / "nothing"))
    assert none.counter is None and isinstance(none.error, MissingError)
    assert source_words(Asked("auto", idle=60, busy=180.5), "model") == "estimated from 60 W idle, 180.5 W busy"


def test_a_kilowatt_hour_at_a_pue_of_1_2_and_230_grams_is_276_grams() -> None:
    assert grams(3.6e6, 1.2, 230.0) == pytest.approx(276.0, rel=1e-12)


def test_a_country_is_found_by_its_letters_with_source_and_year_and_an_unknown_one_is_not() -> None:
    found = intensity("de")
    assert found is not None and found.grams == 381 and found.country == "DE"
    assert found.source == "Our World in Data (Ember, Energy Institute), by CodeCarbon 3.3.2, Germany 2023"
    assert intensity(0.0) is None
    own = intensity(230.0)
    assert own is not None and own.grams == 230 and own.country == "" and "carbon_g_per_kwh" in own.source
    for entry in table()["countries"].values():
        assert 10 < entry["grams"] < 1000 and 2020 <= entry["year"] <= 2025 and entry["name"]


@pytest.mark.parametrize(("keys", "said"), [
    ({"period_ms": 4.9}, "energy.period_ms must lie between 5 and 10000, found 4.9"),
    ({"period_ms": 10_001.0}, "found 10001"), ({"pue": 0.9}, "1 or more, found 0.9"),
    ({"idle_watts": -1.0}, "energy.idle_watts must be a finite number, 0 or more, found -1"),
    ({"busy_watts": -2.0}, "energy.busy_watts must be a finite number"),
    ({"idle_watts": 60.0, "busy_watts": 50.0}, "energy.busy_watts = 50 is less than energy.idle_watts = 60"),
    ({"source": "model", "idle_watts": 9.0}, 'energy.source = "model" estimates from the watts of a host, idle and busy, and '
                                             "energy.busy_watts is 0"),
    ({"source": "model", "busy_watts": 9.0}, "energy.idle_watts is 0"),
    ({"source": "rapl"}, 'energy.source = "rapl" is not there'), ({"carbon_g_per_kwh": -5.0}, "must be at least 0, found -5"),
    ({"carbon_g_per_kwh": "DX"}, 'energy.carbon_g_per_kwh = "DX" is no country of the table (did you mean "D'),
    ({"carbon_g_per_kwh": "germany"}, 'did you mean "DE" for Germany?'),
    ({"root": "x" * 300}, "energy.root has a name of 300 bytes")])
def test_what_may_not_stand_in_energy_is_refused(keys: dict[str, Any], said: str) -> None:
    config = changed(Config(), energy={"source": "auto", **keys}, train={"steps": 1})
    with pytest.raises(ConfigError) as caught:
        check_values(config)
    assert said in caught.value.message


def host(name: str, joules: float | None, **more: Any) -> dict[str, Any]:
    return {"host": name, "joules": joules, "seconds": 10.0, "source": "measured (powercap)" if joules is not None else "unknown",
            "why": "" if joules is not None else "no counter", "gap": "", "phases": None, "residual": None, **more}


def record(*hosts: dict[str, Any], **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"samples": 100, "seconds": 10.0, "before": 0.0, "idle": 0.0, "pue": 1.0, "carbon": None}
    return together(hosts, **{**given, **more})


def test_hosts_are_added_up_and_one_without_a_counter_makes_the_sum_at_least() -> None:
    whole = record(host("a", 200.0), host("b", 100.0), idle=5.0, pue=1.2, carbon=intensity(230.0))
    assert (whole["joules"], whole["at_least"], whole["joules_per_sample"], whole["watts"]) == (300.0, False, 3.0, 30.0)
    assert whole["baseline"] == {"watts": 10.0, "joules": 100.0, "above": 200.0}
    assert whole["carbon"]["grams"] == pytest.approx(300 / 3.6e6 * 1.2 * 230)
    assert line(whole) == ("energy: 300 J (measured (powercap)), 3 J a sample, 30.0 W; "
                           "0.023 g CO2e at 230 g/kWh and a PUE of 1.2")
    part = record(host("a", 200.0), host("b", None))
    assert (part["joules"], part["at_least"], part["without"]) == (200.0, True, ["b"])
    assert line(part).startswith("energy: at least 200 J (measured (powercap), without b)")
    assert record(host("a", 200.0, gap="the GPUs are not counted"))["at_least"]
    continued = record(host("a", 200.0), before=50.0)
    assert (continued["joules"], continued["joules_per_sample"], continued["at_least"]) == (250.0, 2.0, False)
    assert record(host("a", 200.0), before=None)["at_least"]
    none = record(host("a", None), host("b", None), idle=5.0, carbon=intensity("FR"))
    assert [none[key] for key in ("joules", "joules_per_sample", "watts", "baseline", "carbon", "by_phase")] == [None] * 6
    assert none["source"] == "unknown" and line(none) == "energy unknown: no counter"


def test_phases_of_hosts_are_added_up_where_all_have_them() -> None:
    one = {"forward": {"seconds": 4.0, "watts": 10.0, "joules": 40.0, "error": 3.0}}
    two = {"forward": {"seconds": 1.0, "watts": 20.0, "joules": 20.0, "error": 4.0}}
    both = record(host("a", 40.0, phases=one, residual=0.1), host("b", 20.0, phases=two, residual=0.2))
    assert both["by_phase"] == {"forward": {"seconds": 5.0, "watts": 12.0, "joules": 60.0, "error": 5.0}}
    assert both["residual"] == 0.2
    assert record(host("a", 40.0, phases=one, residual=0.1), host("b", 20.0))["by_phase"] is None


@pytest.mark.parametrize(("joules", "said"), [(2.5e7, "25 MJ"), (12_345.0, "12.35 kJ"), (1234.5, "1,234 J"), (0.0123, "12.3 mJ"),
                                              (2e-6, "2 uJ"), (0.0, "0 uJ")])
def test_joules_have_the_unit_that_suits_them(joules: float, said: str) -> None:
    assert in_joules(joules) == said


def test_joules_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    assert joules_of_run(tmp_path) == NONE
    lines = [{"step": 1, "joules": 2.0, "joules_per_sample": 0.5, "energy_source": "measured (powercap)"},
             {"step": 1, "split": "validation", "accuracy": 0.5},
             {"step": 2, "joules": 4.0, "joules_per_sample": 1.0, "energy_source": "measured (powercap)"},
             {"step": 2, "split": "validation", "accuracy": 0.9}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert joules_of_run(tmp_path) == JoulesOfRun(6.0, 0.75, False, "measured (powercap)")
    assert (joules_to(tmp_path, "accuracy", 0.4), joules_to(tmp_path, "accuracy", 0.9)) == (2.0, 6.0)
    assert joules_to(tmp_path, "accuracy", 0.95) is None and joules_to(tmp_path, "accuracy", 0.5, higher=False) == 2.0
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "energy": {}}))
    assert joules_of_run(tmp_path).joules == 6.0
    done = {"joules": 7.5, "joules_per_sample": 0.9, "at_least": True, "source": "measured (nvml)"}
    (tmp_path / "run.json").write_text(json.dumps({"status": "done", "energy": done}))
    assert joules_of_run(tmp_path) == JoulesOfRun(7.5, 0.9, True, "measured (nvml)")
    lines[2]["joules"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "run.json").unlink()
    assert joules_of_run(tmp_path) == NONE and joules_to(tmp_path, "accuracy", 0.9) is None


# Batch size: joules a sample, samples a second, epochs of 50,000 samples to the target. Large batches are fast and need epochs.
BATCHES = {32: (0.0120, 4_000.0, 10), 64: (0.0085, 7_000.0, 10), 128: (0.0070, 11_000.0, 11), 256: (0.0068, 15_000.0, 13),
           512: (0.0070, 17_000.0, 19)}


@pytest.mark.parametrize(("eta", "best"), [(0.0, 256), (0.5, 256), (1.0, 128)])
def test_the_cheapest_batch_size_is_that_of_the_table(eta: float, best: int) -> None:
    """By whole numbers: millijoules to the target, and milliseconds times 300 W."""
    tried = {batch: (joules * 50_000 * epochs, 50_000 * epochs / rate) for batch, (joules, rate, epochs) in BATCHES.items()}
    table = {batch: round(1e4 * (eta * round(1e4 * joules) / 1e4 + (1 - eta) * 300 / rate) * epochs * 5)
             for batch, (joules, rate, epochs) in BATCHES.items()}
    assert cheapest(tried, eta=eta, most_watts=300.0) == min(table, key=table.__getitem__) == best
    assert cost(*tried[best], eta=eta, most_watts=300.0) == pytest.approx(table[best], rel=1e-3)


def test_a_cost_needs_a_share_and_joules_that_are_known() -> None:
    assert cost(None, 2.0, eta=0.0, most_watts=100.0) == 200.0
    for joules, eta, said in ((None, 0.5, "those of this run are unknown"), (1.0, 1.5, "0 to 1, found 1.5"),
                              (1.0, -1.0, "found -1")):
        with pytest.raises(UsageError, match=said):
            cost(joules, 2.0, eta=eta, most_watts=100.0)
    with pytest.raises(UsageError, match="nothing was tried"):
        cheapest({}, eta=1.0, most_watts=1.0)


def test_lines_before_a_counter_has_moved_are_neither_zero_nor_the_end_of_what_is_known(tmp_path: Path) -> None:
    lines = [{"step": 1, "joules": None, "joules_per_sample": None, "energy_source": NOT_YET},
             {"step": 1, "split": "validation", "accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert joules_of_run(tmp_path) == NONE and joules_to(tmp_path, "accuracy", 0.5) is None
    lines += [{"step": 2, "joules": 4.0, "joules_per_sample": 1.0, "energy_source": "measured (powercap)"},
              {"step": 2, "split": "validation", "accuracy": 0.9}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert joules_of_run(tmp_path) == JoulesOfRun(4.0, 1.0, False, "measured (powercap)")
    assert joules_to(tmp_path, "accuracy", 0.9) == 4.0
