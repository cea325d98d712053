"""Limits of a host: what is found, set, refused and put back, on a tree of files and NVML's functions in their place."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from sys_trees import CLOCK, WATTS, put, settings, sys_tree

from mpitrain.comm.job.guard import Process
from mpitrain.config import Config, load_config
from mpitrain.config.energy import EnergyConfig
from mpitrain.energy import guardian, knobs
from mpitrain.energy.limits import HostLimits
from mpitrain.errors import AccessError, ConfigError, MissingError, MpitrainError, OutputError, UsageError
from mpitrain.run.limits import ProcessLimits, agree
from mpitrain.search.settings import refuse_keys

FAKE = Path(__file__).with_name("fake") / "pynvml.py"
AS_BEFORE = {"intel-rapl:0": WATTS, "intel-rapl:1": WATTS, "intel-rapl:0:0": WATTS, "intel-rapl:2": WATTS,
             "intel-rapl-mmio:0": WATTS, "policy0": CLOCK, "policy2": CLOCK, "policy10": CLOCK}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(guardian, "RECORDS", tmp_path)
    return sys_tree(tmp_path / "sys")


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    (tmp_path / "gpus").write_text("[700000, 650000]")
    spec = importlib.util.spec_from_file_location("fake_nvml", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_packages_alone_are_limited_and_the_policies_come_in_their_order(tree: Path) -> None:
    assert [knob.path.parent.name for knob in knobs.power_limits(tree)] == ["intel-rapl:0", "intel-rapl:1"]
    assert [knob.path.parent.name for knob in knobs.clock_limits(tree)] == ["policy0", "policy2", "policy10"]


def test_limits_are_set_and_each_put_back_to_what_it_was(tree: Path) -> None:
    put(tree / "intel-rapl:1/constraint_0_power_limit_uw", 180_000_000)
    limits = guardian.Limits({"cap_watts": 120.5, "clock_mhz": 2000}, tree, None, 1)
    assert settings(tree) == AS_BEFORE | {"intel-rapl:0": 120_500_000, "intel-rapl:1": 120_500_000, "policy0": 2_000_000,
                                          "policy2": 2_000_000, "policy10": 2_000_000}
    assert limits.said[1] == "the power limit of package-1 180 W -> 120.5 W"
    assert limits.undo() == [] and settings(tree) == AS_BEFORE | {"intel-rapl:1": 180_000_000}
    assert not list(tree.parents[2].glob("mpitrain-limits-*"))


@pytest.mark.parametrize(("wanted", "file", "text", "error", "says"), [
    ({"cap_watts": 251}, "", "", ConfigError, "cap_watts = 251 cannot be set: the power limit of package-0 takes at most 250 W"),
    ({"cap_watts": 40}, "class/powercap/intel-rapl:1/constraint_0_min_power_uw", 50_000_000, ConfigError, "takes at least 50 W"),
    ({"clock_mhz": 700}, "", "", ConfigError, "the highest clock of policy0 takes at least 800 MHz"),
    ({"clock_mhz": 4000}, "", "", ConfigError, "takes at most 3200 MHz"),
    ({"cap_watts": 100}, "class/powercap/intel-rapl:1/enabled", 0, ConfigError, "an administrator would: echo 1 | sudo tee"),
    ({"cap_watts": 100}, "class/powercap/intel-rapl:1/constraint_0_power_limit_uw", "text", ConfigError, "expected a number"),
    ({"clock_mhz": 1000}, "devices/system/cpu/cpufreq/policy2/cpuinfo_max_freq", "", ConfigError, "expected a number")])
def test_what_the_hardware_cannot_have_is_refused_and_nothing_is_changed(
        tree: Path, wanted: dict[str, float], file: str, text: object, error: type[MpitrainError], says: str) -> None:
    if file:
        put(tree.parents[1] / file, text)
    before = {path: path.read_text() for path in tree.parents[1].rglob("*") if path.is_file()}
    with pytest.raises(error, match=says.replace("(", r"\(")):
        guardian.Limits(wanted, tree, None, 1)
    assert before == {path: path.read_text() for path in tree.parents[1].rglob("*") if path.is_file()}
    assert not list(tree.parents[2].glob("mpitrain-limits-*"))


def test_a_host_without_the_files_has_no_limits_to_set(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no processor package here has a power limit"):
        knobs.power_limits(tmp_path / "nowhere")
    with pytest.raises(MissingError, match="clocks of this host cannot be set"):
        knobs.clock_limits(tmp_path / "sys/class/powercap")


def test_a_second_knob_that_fails_undoes_the_first(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take another number than the one that was written; then all are as before."""
    monkeypatch.setattr(knobs.FileKnob, "_write", lambda self, value: put(
        self.path, value if "policy2" not in str(self.path) else CLOCK))
    with pytest.raises(ConfigError, match="policy2 was set to 2000 MHz, and the kernel says 3200 MHz"):
        guardian.Limits({"cap_watts": 100, "clock_mhz": 2000}, tree, None, 1)
    assert settings(tree) == AS_BEFORE


def test_the_limits_of_the_visible_gpus_are_set_and_put_back(nvml: ModuleType, tmp_path: Path, tree: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for visible, set_ in ((None, [300_000, 300_000]), ("1", [700_000, 300_000]), ("GPU-0b", [300_000, 650_000])):
        limits = guardian.Limits({"gpu_cap_watts": 300}, tree, visible, 1)
        assert json.loads((tmp_path / "gpus").read_text()) == set_
        assert limits.undo() == [] and json.loads((tmp_path / "gpus").read_text()) == [700_000, 650_000]
    with pytest.raises(ConfigError, match="GPU 0 takes at most 700 W"):
        guardian.Limits({"gpu_cap_watts": 800}, tree, None, 1)
    with pytest.raises(MissingError, match="NVML finds no GPU"):
        guardian.Limits({"gpu_cap_watts": 300}, tree, "7", 1)
    monkeypatch.setenv("FAKE_NVML_MAY", "0")
    with pytest.raises(AccessError, match="sudo nvidia-smi -i 0 -pl 300, and the same with 700 after the run"):
        guardian.Limits({"gpu_cap_watts": 300}, tree, None, 1)


def test_without_the_package_of_nvml_it_says_what_to_install(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingError, match="pip install nvidia-ml-py"):
        guardian.Limits({"gpu_cap_watts": 300}, tree, None, 1)


def test_the_functions_in_place_of_nvml_have_its_signatures(nvml: ModuleType) -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in filter(lambda name: name.startswith("nvml"), dir(nvml)):
        assert list(inspect.signature(getattr(real, name)).parameters) == list(inspect.signature(getattr(nvml, name)).parameters)
    assert real.NVML_ERROR_NO_PERMISSION == nvml.NVML_ERROR_NO_PERMISSION
    assert real.NVMLError(real.NVML_ERROR_NO_PERMISSION).value == real.NVML_ERROR_NO_PERMISSION


def test_a_user_who_may_not_set_a_limit_hears_what_an_administrator_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:              # pytest's own folders are closed to other users
        tree = sys_tree(Path(folder) / "sys")
        monkeypatch.setattr(guardian, "RECORDS", Path(folder))
        for path in Path(folder).rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        Path(folder).chmod(0o777)
        user = os.geteuid()
        os.seteuid(user or 65534)                                        # root may write to any file
        try:
            with pytest.raises(AccessError) as refused:
                guardian.Limits({"cap_watts": 100}, tree, None, 1)
        finally:
            os.seteuid(user)
        assert f"administrator would: sudo chmod a+w {tree}/intel-rapl:0/constraint_0_power_limit_uw" in refused.value.message
        assert settings(tree) == AS_BEFORE and not list(Path(folder).glob("mpitrain-limits-*"))


def test_one_run_at_a_time_limits_a_host(tree: Path) -> None:
    limits = guardian.Limits({"cap_watts": 100}, tree, None, 4711)
    with pytest.raises(OutputError, match=r"another run \(process 4711\) holds the limits"):
        guardian.Limits({"cap_watts": 90}, tree, None, 1)
    assert guardian.undo_leftovers(tree.parents[2]) == []            # nothing of a run that lives
    limits.undo()
    guardian.Limits({"cap_watts": 90}, tree, None, 1).undo()
    assert settings(tree) == AS_BEFORE


def test_what_a_killed_guardian_has_left_is_put_back_by_the_next(tree: Path) -> None:
    for undo in (lambda: guardian.undo_leftovers(tree.parents[2]),
                 lambda: [guardian.Limits({"clock_mhz": 1000}, tree, None, 2)][0]):
        left = guardian.Limits({"cap_watts": 100}, tree, None, 4711)
        left.record.close()                                          # as the kernel does
        again = undo()
        said = again if isinstance(again, list) else again.said + again.undo()
        assert said[0] == "put back the limits that a killed run (process 4711) had left on this host"
        assert settings(tree) == AS_BEFORE and not list(tree.parents[2].glob("mpitrain-limits-*"))


def test_a_record_that_is_not_ours_or_damaged_is_not_believed(tree: Path) -> None:
    path = guardian.record_of(tree)
    path.symlink_to(tree / "intel-rapl:0/constraint_0_power_limit_uw")
    with pytest.raises(OutputError, match="somebody has put something in the place"):
        guardian.Limits({"cap_watts": 100}, tree, None, 1)
    path.unlink()
    put(path, '{"before": {"the power limit of package-0": 1')
    path.chmod(0o666)
    with pytest.raises(OutputError, match="not written by this user's runs"):
        guardian.Limits({"cap_watts": 100}, tree, None, 1)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        guardian.Limits({"cap_watts": 100}, tree, None, 1)
    assert settings(tree) == AS_BEFORE


def test_a_host_keeps_its_limits_until_they_are_ended(tree: Path, nvml: ModuleType, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds them finds nvidia-ml-py where the run does."""
    monkeypatch.syspath_prepend(str(FAKE.parent))
    held = HostLimits({"cap_watts": 100, "gpu_cap_watts": 250}, tree)
    assert held.refused is None and len(held.said) == 4
    assert settings(tree)["intel-rapl:1"] == 100_000_000 and json.loads((tmp_path / "gpus").read_text()) == [250_000, 250_000]
    assert held.undo() == [] and held.undo() == [] and settings(tree) == AS_BEFORE
    refused = HostLimits({"cap_watts": 1000}, tree).refused
    assert refused is not None and refused[0] == "ConfigError"


def test_a_run_whose_limits_nobody_has_set_is_refused() -> None:
    """Its communicator was made by a program that has set none, or others, before MPI started."""
    config = Config(energy=EnergyConfig(cap_watts=100))
    process = Process()
    with pytest.raises(UsageError, match=r"limits of hosts \(energy.cap_watts\) are set before MPI starts.* and none were"):
        agree(config, None, [], process)
    process.limits = ProcessLimits({"cap_watts": 90.0}, None)
    with pytest.raises(UsageError, match="and others were; make this run with Run.of_job"):
        agree(config, None, [], process)
    assert agree(Config(), None, [], process) == []


@pytest.mark.parametrize("key", ["cap_watts", "clock_mhz", "gpu_cap_watts"])
def test_a_limit_is_a_number_of_0_or_more_and_the_same_for_all_trials_of_a_study(key: str) -> None:
    with pytest.raises(ConfigError, match=f"energy.{key} must be a finite number, 0 or more, found -1"):
        load_config(None, [f"energy.{key}=-1"])
    with pytest.raises(ConfigError, match=f"energy.{key}.*the same for all trials of a study"):
        refuse_keys([f"energy.{key}"])
