"""Counters of processors: which are added up, what they say when they begin anew, and when they can no longer be trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trees import set_joules, zone

from mpitrain.energy.zones import Energy, Lost, Powercap, find_zones
from mpitrain.errors import AccessError, DataError, MissingError


def one_socket(root: Path) -> None:
    package = zone(root, "intel-rapl:0", "package-0")
    zone(package, "intel-rapl:0:0", "core")
    zone(package, "intel-rapl:0:1", "uncore")


def two_sockets_with_dies(root: Path) -> None:
    """Numbers of zones are not those of packages."""
    for number, name in ((0, "package-1-die-0"), (1, "package-0-die-0"), (2, "package-0-die-1"), (10, "package-1-die-1")):
        zone(root, f"intel-rapl:{number}", name)


def psys(root: Path) -> None:
    zone(root, "intel-rapl:0", "psys")
    zone(root, "intel-rapl:1", "package-0")


def dram(root: Path) -> None:
    for number in range(2):
        package = zone(root, f"intel-rapl:{number}", f"package-{number}")
        zone(package, f"intel-rapl:{number}:0", "dram")
        zone(package, f"intel-rapl:{number}:1", "core")


def mmio(root: Path) -> None:
    zone(root, "intel-rapl-mmio:0", "package-0")
    zone(root, "intel-rapl:0", "package-0")
    (root / "intel-rapl").mkdir()                 # the control type, which has no name
    (root / "dtpm").mkdir()


def amd(root: Path) -> None:
    package = zone(root, "intel-rapl:0", "package-0", range_uj=65_532_610_987)
    zone(package, "intel-rapl:0:0", "core")


ADDED: list[tuple[Callable[[Path], None], list[str], list[str]]] = [
    (one_socket, ["package-0"], ["intel-rapl:0:0 (core)", "intel-rapl:0:1 (uncore)"]),
    (two_sockets_with_dies, ["package-1-die-0", "package-0-die-0", "package-0-die-1", "package-1-die-1"], []),
    (psys, ["package-0"], ["intel-rapl:0 (psys)"]),
    (dram, ["package-0", "package-0 dram", "package-1", "package-1 dram"], ["intel-rapl:0:1 (core)", "intel-rapl:1:1 (core)"]),
    (mmio, ["package-0"], ["intel-rapl-mmio:0 (package-0)"]),
    (amd, ["package-0"], ["intel-rapl:0:0 (core)"])]


@pytest.mark.parametrize(("tree", "added", "left_out"), ADDED, ids=lambda value: getattr(value, "__name__", ""))
def test_packages_and_the_memory_beside_them_are_added_up_and_nothing_that_repeats_them(
        tree: Callable[[Path], None], added: list[str], left_out: list[str], tmp_path: Path) -> None:
    tree(tmp_path)
    found = find_zones(tmp_path)
    assert [zone.name for zone in found.added] == added
    assert [name for name, _ in found.left_out] == left_out
    assert all(reason for _, reason in found.left_out)


def test_where_there_is_no_counter_it_is_said_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="expected a folder of energy counters, found nothing: there is none on a virtual"):
        find_zones(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="found a file"):
        find_zones(tmp_path / "file")
    with pytest.raises(MissingError, match="expected the counter of a processor package .* found none$"):
        find_zones(tmp_path)
    zone(tmp_path, "intel-rapl:0", "psys")
    with pytest.raises(MissingError, match=r"found none; it has intel-rapl:0 \(psys\)"):
        find_zones(tmp_path)


def test_a_counter_that_cannot_be_read_makes_the_whole_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dram(tmp_path)
    shut = tmp_path / "intel-rapl:1/intel-rapl:1:0/energy_uj"
    shut.unlink()
    shut.mkdir()                                  # as root reads every file, a folder stands for one that may not be read
    with pytest.raises(MissingError, match="the energy counter cannot be read: Is a directory") as caught:
        Powercap(tmp_path)
    assert caught.value.file == str(shut)
    shut.rmdir()

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("mpitrain.energy.zones.os.open", denied)
    with pytest.raises(AccessError, match=f"permission denied; an administrator may allow it: chmod a.r {tmp_path}/intel-rapl"):
        Powercap(tmp_path)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("energy_uj", "12 J", 'expected a number of microjoules, found "12 J"'), ("energy_uj", "", 'found ""'),
    ("energy_uj", "-5", 'found "-5"'), ("max_energy_range_uj", "much", 'found "much"'),
    ("max_energy_range_uj", "0", "expected a number of microjoules above 0")])
def test_text_where_a_number_belongs_is_refused_with_its_file(name: str, text: str, said: str, tmp_path: Path) -> None:
    one_socket(tmp_path)
    (tmp_path / "intel-rapl:0" / name).write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        Powercap(tmp_path)
    assert caught.value.file == str(tmp_path / "intel-rapl:0" / name)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_three_turns_of_a_counter_are_within_a_tenth_of_a_percent_of_the_truth(tmp_path: Path) -> None:
    """A power that changes with time, integrated in closed form; the counter is that of a processor that turns after 65.5 kJ."""
    clock, tree = Clock(), zone(tmp_path, "intel-rapl:0", "package-0", 30_000.0, 65_532_610_987)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 0.0)
    counter = Powercap(tmp_path, clock)
    began = clock.now
    for second in range(1, 301):
        clock.now = began + second
        truth = 500 * second + second ** 2                   # 500 W, rising by 2 W a second
        set_joules(tree, 30_000.0 + truth)
        set_joules(other, 5.0 * second)
        found = counter.joules()
    assert (30_000 + truth) // 65_532.610988 == 4 and found == pytest.approx(truth + 1500, rel=1e-3)
    assert counter.parts() == {"package-0": pytest.approx(truth, rel=1e-3), "package-1": pytest.approx(1500, rel=1e-3)}
    counter.close()


@pytest.mark.parametrize(("before", "after", "seconds", "said"), [
    (200.0, 100.0, 0.05, "the counter of package-0 went back from 200,000,000 to 100,000,000 uJ in 0.050 s, which 1,000 W do"),
    (200.0, 500.0, 0.1, "the counter of package-0 went from 200,000,000 to 500,000,000 uJ"),
    (200.0, 201.0, 600.0, "was not read for 600.0 s, in which it may have begun anew more than once")])
def test_what_a_thousand_watts_do_not_explain_is_unknown_from_there_on(before: float, after: float, seconds: float, said: str,
                                                                       tmp_path: Path) -> None:
    clock, tree = Clock(), zone(tmp_path, "intel-rapl:0", "package-0", before)
    counter = Powercap(tmp_path, clock)
    clock.now += seconds
    set_joules(tree, after)
    with pytest.raises(Lost, match=said):
        counter.joules()


def test_a_counter_is_set_back_only_by_a_turn_that_the_power_explains(tmp_path: Path) -> None:
    clock, tree = Clock(), zone(tmp_path, "intel-rapl:0", "package-0", 262_140.0)
    counter = Powercap(tmp_path, clock)
    clock.now += 0.5
    set_joules(tree, 262_240.0)                   # 97 J after the turn
    assert int((tree / "energy_uj").read_text()) < 97e6 and counter.joules() == pytest.approx(100.0, rel=1e-6)


def test_a_package_whose_counter_stands_still_is_unknown_and_memory_may_rest(tmp_path: Path) -> None:
    dram(tmp_path)
    clock = Clock()
    counter = Powercap(tmp_path, clock)
    for _ in range(30):
        clock.now += 1.0
        for number in range(2):
            set_joules(tmp_path / f"intel-rapl:{number}", clock.now)
        counter.joules()                          # memory has used nothing for 30 s
    for _ in range(10):
        clock.now += 1.0
        set_joules(tmp_path / "intel-rapl:0", clock.now)
        counter.joules()
    clock.now += 1.0
    set_joules(tmp_path / "intel-rapl:0", clock.now)
    with pytest.raises(Lost, match="the counter of package-1 stands still at 130,000,000 uJ for 11 s"):
        counter.joules()


def test_a_benchmark_asks_for_joules_since_its_last_call_and_is_told_why_there_are_none(tmp_path: Path) -> None:
    dram(tmp_path)
    clock = Clock()
    energy = Energy(tmp_path, clock)
    clock.now += 1.0
    for number in range(2):
        set_joules(tmp_path / f"intel-rapl:{number}", 3.5)
    set_joules(tmp_path / "intel-rapl:1/intel-rapl:1:0", 2.0)
    assert energy.why == "" and energy.joules() == pytest.approx(2.5 + 2.5 + 1.0) and energy.joules() == 0.0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("gone")
    assert energy.joules() is None and 'found "gone"' in energy.why and energy.joules() is None
    none = Energy(tmp_path / "missing")
    assert none.joules() is None and "there is none on a virtual machine" in none.why
