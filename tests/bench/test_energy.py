"""`mpitrain bench energy`: its figures where powers are known, and what it says and writes, or does not, without a counter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import mpirun
from trees import set_joules, zone

from mpitrain.bench.energy import Bench, Figure, Work, as_json, bench_energy, found_of, measure, with_watts, works
from mpitrain.bench.report import Report
from mpitrain.cli import main
from mpitrain.comm.job import signals
from mpitrain.energy.zones import Energy
from mpitrain.errors import MissingError, UsageError
from mpitrain.machines.machine import load_machine, to_toml

IDLE, WATTS = 40.0, {"one core": 62.0, "product": 75.0}


class Machine:
    """A host whose clock and counter move when it sleeps or works: a call of 0.01 s at the watts of its work."""

    def __init__(self, root: Path):
        self.now, self.joules, self.tree = 50.0, 1000.0, zone(root, "intel-rapl:0", "package-0", 1000.0)
        self.root, self.turn = root, 0

    def clock(self) -> float:
        return self.now

    def passes(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += watts * seconds
        set_joules(self.tree, self.joules)

    def sleep(self, seconds: float) -> None:
        self.turn += 1
        self.passes(seconds, IDLE + 0.1 * (-1) ** self.turn)

    def work(self, name: str) -> None:
        self.passes(0.01, WATTS[name])


class Alone:
    """A channel of one rank."""

    rank, size = 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_figures_are_those_of_known_powers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = Machine(tmp_path)
    world: Any = SimpleNamespace(rank=0, size=1, comm=SimpleNamespace(Barrier=lambda: None))
    bench = Bench(Alone(), world, Energy(tmp_path, host.clock), 2.0, 4, clock=host.clock, sleep=host.sleep)  # type: ignore[arg-type]
    asked = [Work("one core", lambda: host.work("one core")), Work("product", lambda: host.work("product"), 0.5, "GFLOP")]
    found = measure(bench, asked, Report(0, None))
    error = math.sqrt(4 * 0.1 ** 2 / 3) / math.sqrt(4)       # of the mean of 39.9, 40.1, 39.9 and 40.1 W
    assert found["idle"].watts == pytest.approx((40.0, error), abs=1e-4)
    assert found["one core"].watts == pytest.approx((62.0, 0.0), abs=1e-4)
    assert found["one core"].above == pytest.approx((22.0, error), abs=1e-4)
    product = found["product"]
    assert product.rate == pytest.approx(50.0) and product.joules is not None, "0.5 GFLOP in 0.01 s"
    assert product.joules == pytest.approx((35.0 / 50.0, error / 50.0), rel=1e-3)
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["idle", "40.00", "+-", "0.06"] and said[4].split()[-4:] == ["0.700", "+-", "0.001", "J/GFLOP"]
    assert as_json(found)["product"]["joules_a_unit"]["mean"] == pytest.approx(0.7, rel=1e-3)
    host.passes = lambda seconds, watts: setattr(host, "now", host.now + seconds)  # type: ignore[method-assign]
    with pytest.raises(MissingError, match="energy unknown: the counter of this host does not move"):
        bench.windows(asked[0])


def test_errors_of_idle_and_of_work_are_both_in_what_is_above_idle() -> None:
    from mpitrain.bench.energy import Window
    found = found_of([Window(100.0, 1.0), Window(104.0, 1.0)], Figure(40.0, 1.5), 10.0)
    assert found.watts == pytest.approx((102.0, 2.0)) and found.above == pytest.approx((62.0, 2.5))
    assert found.joules == pytest.approx((6.2, 0.25)) and found.rate == 10.0


def test_the_watts_of_a_rank_go_into_a_machine_file_with_their_source(tmp_path: Path) -> None:
    kept = load_machine("dgx-1")
    made = with_watts(kept, 80.0, 240.0, 4, "a processor")
    path = tmp_path / "here.toml"
    path.write_text(to_toml(made))
    again = load_machine(path)
    assert (again.idle_watts, again.busy_watts) == (20.0, 60.0) and again.levels == kept.levels
    assert again.sources["busy_watts"].startswith("mpitrain bench energy, ")
    assert "4 ranks of a processor" in again.sources["idle_watts"]
    assert "idle_watts" in kept.assumed and "idle_watts" not in again.assumed


def test_works_can_be_done(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(rank=0, size=1)
    for work in works(world):
        assert work.call is not None
        work.call()
    assert [work.unit for work in works(world)] == ["", "", "GFLOP", "GB"]


@pytest.mark.parametrize(("words", "said"), [
    (("--seconds", "0.01"), "--seconds must lie between 0.1 and 60"), (("--seconds", "100"), "found 100"),
    (("--repeats", "1"), "--repeats must be at least 2, found 1")])
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ignore", lambda: None)
    with pytest.raises(UsageError) as caught:
        main(["bench", "energy", *words])
    assert said in caught.value.message


def test_without_a_counter_it_says_unknown_and_leaves_the_machine_file_alone(tmp_path: Path) -> None:
    said = mpirun(2, "-m", "mpitrain", "bench", "energy", "--root", "none", "--json", "r.json", cwd=tmp_path)
    assert said.rc == 0 and said.out.startswith('energy unknown: file="none": expected a folder of energy counters')
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["idle_watts"] is None and record["busy_watts"] is None and "expected a folder" in record["why"]
    (tmp_path / "here.toml").write_text(to_toml(load_machine("dgx-1")))
    before = (tmp_path / "here.toml").read_text()
    refused = mpirun(1, "-m", "mpitrain", "bench", "energy", "--root", "none", "--out", "here.toml", cwd=tmp_path)
    line, = refused.error_lines
    assert refused.rc == 66 and "here.toml is left as it is" in line and (tmp_path / "here.toml").read_text() == before
    missing = mpirun(1, "-m", "mpitrain", "bench", "energy", "--out", "other.toml", cwd=tmp_path)
    assert missing.rc == 66 and "expected a machine file" in missing.error_lines[0]


def test_a_host_is_measured_and_its_file_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it on one rank, with works whose powers are known."""
    host = Machine(tmp_path / "powercap")
    asked = [Work("all ranks", lambda: host.work("one core")), Work("product", lambda: host.work("product"), 0.5, "GFLOP")]
    monkeypatch.setattr("mpitrain.bench.energy.works", lambda world: asked)
    monkeypatch.setattr("mpitrain.bench.energy.machine", lambda channel: {"hosts": 1, "cpu": "a processor"})
    monkeypatch.setattr("mpitrain.bench.energy.Energy", lambda root: Energy(root, host.clock))
    monkeypatch.setattr("mpitrain.bench.energy.Bench", lambda *given: Bench(*given, clock=host.clock, sleep=host.sleep))
    world: Any = SimpleNamespace(rank=0, size=1, comm=SimpleNamespace(Barrier=lambda: None))
    path, channel = tmp_path / "here.toml", Alone()
    path.write_text(to_toml(load_machine("dgx-1")))
    bench_energy(channel, world, Report(0, tmp_path / "r.json"), seconds=2.0, repeats=3, root=host.root,  # type: ignore[arg-type]
                 out=path)
    found = load_machine(path)
    assert found.idle_watts == pytest.approx(40.0, abs=0.1) and found.busy_watts == pytest.approx(62.0)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["busy_watts"]["mean"] == pytest.approx(62.0) and record["works"]["product"]["joules_a_unit"]["mean"] > 0.6
