"""The cores bound to a process and the CPU time its control groups grant, read from folders laid out as Linux does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.backend.cpu import bound_cores, cpu_flags, cpu_limit


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_two_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write(tmp_path, f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", f"{number % 2},{number % 2 + 2}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert bound_cores(tmp_path) == (0, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    assert bound_cores(tmp_path) == (1,)
    write(tmp_path, "sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n")
    assert bound_cores(tmp_path) == (0, 1), "cpu1 belongs to core 0 now, cpu3 to core 1"


def test_without_sys_each_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 9})
    assert bound_cores(tmp_path) == (2, 5, 9)


@pytest.mark.parametrize(("job", "step", "limit"), [("max 100000", "150000 100000", 1.5), ("200000 100000", "max 100000", 2.0),
                                                    ("100000 50000", "800000 100000", 2.0), ("max 100000", "max 100000", 0.0)])
def test_the_tightest_control_group_above_a_process_counts(tmp_path: Path, job: str, step: str, limit: float) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slurm/job/step\n")
    write(tmp_path, "sys/fs/cgroup/slurm/job/cpu.max", job + "\n")
    write(tmp_path, "sys/fs/cgroup/slurm/job/step/cpu.max", step + "\n")
    assert cpu_limit(tmp_path) == limit


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:cpuset:/a\n4:cpu,cpuacct:/docker/x\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "350000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n")
    assert cpu_limit(tmp_path) == 3.5
    write(tmp_path, "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "-1\n")
    assert cpu_limit(tmp_path) == 0.0


def test_a_group_that_is_seen_from_inside_as_the_root_is_found(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/outside/this/container\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert cpu_limit(tmp_path) == 1.0


def test_where_nothing_is_told_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) == 0.0


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_flags_are_those_of_proc_cpuinfo() -> None:
    text = Path("/proc/cpuinfo").read_text()
    assert all(flag in text for flag in cpu_flags()) and len(cpu_flags()) > 5
