"""bench fit --out: the file it writes is a machine that plans can read, and says what was measured on how many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from standing import mpirun

from mpitrain.bench.calibrate_levels import costs
from mpitrain.energy.zones import Energy
from mpitrain.machines import load_machine, to_toml
from mpitrain.machines.machine import machine_of
from mpitrain.machines.measured import at_ranks, crowded, fingerprint, is_here, step_seconds, turns
from mpitrain.schedules.level_times import Level, level_seconds


@pytest.mark.slow
def test_the_file_of_a_calibration_is_a_machine_with_tables_for_each_number_of_ranks(tmp_path: Path) -> None:
    result = mpirun(3, "-m", "mpitrain", "bench", "fit", "--out", "here.toml", "--name", "ours", cwd=tmp_path, timeout=170)
    assert result.rc == 0, result.out + result.err
    machine = load_machine(tmp_path / "here.toml")
    assert machine.name == "ours" and is_here(machine) and 0 < machine.efficiency <= 1
    assert machine.flops["float32"] > machine.flops["float64"] > 1e8 and machine.memory_bandwidth > 1e8
    assert machine.reader_bytes_s > 1e6 and machine.overlap == 0.0 and machine.cores >= 1
    by_ranks = machine.measured["by_ranks"]
    assert set(by_ranks) == {"1", "2", "3"} and machine.measured["contention"]["ranks"] == [1, 2, 3]
    assert by_ranks["1"].keys() == {"step_s", "turns"} and set(by_ranks["3"]["layers"]) == {"3"}
    for n in "23":
        assert by_ranks[n]["step_s"] > 0 and by_ranks[n]["turns"] >= 1
        for way in ("shared", "messages"):
            assert by_ranks[n][way]["alpha"] >= 0 and all(seconds > 0 for _, seconds in by_ranks[n][way]["points"])
    assert machine.busy_watts == 0.0 or not Energy().why      # unknown where nobody counts, never a guess
    for ranks in (2, 3):
        found = at_ranks(machine, ranks)
        size, seconds = by_ranks[str(ranks)]["shared"]["points"][4]
        assert level_seconds("all_reduce", ranks, 1, size, found.levels) == pytest.approx(seconds)
        assert ranks / found.cores == pytest.approx(turns(machine, ranks)) and step_seconds(machine, ranks) > 0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--out", "here.json"], "that ends in .toml, in a folder that is there to write to; found here.json"),
    (["--out", "nowhere/here.toml"], "--out takes a file to write that ends in .toml, in a folder that is there"),
    (["--name", "ours"], "--name is that of the machine in a file; give --out FILE, too")])
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "fit", *arguments, cwd=tmp_path)
    assert result.rc == 64 and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_machine_s_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 3\n")
    result = mpirun(2, "-m", "mpitrain", "bench", "fit", "--out", "run.toml", cwd=tmp_path)
    assert result.rc == 64 and "--out would overwrite run.toml, which is not the file of a machine" in result.error_lines[0]
    assert (tmp_path / "run.toml").read_text() == "[train]\nsteps = 3\n"


def test_one_rank_is_told_to_be_two(tmp_path: Path) -> None:
    result = mpirun(1, "-m", "mpitrain", "bench", "fit", "--out", "here.toml", cwd=tmp_path)
    assert result.rc == 64 and "--out measures exchange, too" in result.error_lines[0] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_the_costs_of_a_level_give_back_the_all_reduces_that_they_were_made_of(n: int) -> None:
    """Points of a level whose messages and bytes cost as much as sums: alpha and beta are found, for any number of ranks."""
    level = Level("node", 0, 3e-6, 4e-10, 0.0)
    points = [(float(size), level_seconds("all_reduce", n, 1, size, (level,))) for size in (64, 4 << 10, 256 << 10, 4 << 20)]
    found = costs(n, points)
    assert (found.alpha, found.beta) == pytest.approx((level.alpha, level.beta), rel=1e-6)


def test_the_same_host_has_the_same_fingerprint_and_another_name_does_not_matter() -> None:
    assert fingerprint() == fingerprint() and len(fingerprint()) == 16
    shipped = load_machine("dgx-a100")
    assert not is_here(shipped) and at_ranks(shipped, 64) is shipped
    assert machine_of({**_table(to_toml(shipped)), "measured": {"fingerprint": fingerprint()}}).name == shipped.name


def _table(text: str) -> dict[str, object]:
    import tomllib
    return tomllib.loads(text)


def test_a_host_on_which_other_processes_are_at_work_is_said_to_be_busy() -> None:
    assert [crowded(*found) for found in ((1, 1.0, 2), (2, 1.3, 2), (3, 2.0, 2), (4, 2.8, 2))] == [""] * 4
    assert crowded(2, 9.13, 2).startswith("2 ranks took 9.1 times their processor time, 1.0 times are expected")
