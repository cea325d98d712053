"""A tree of files that looks like /sys of a host with two processor packages, for tests of what sets their limits."""

from __future__ import annotations

from pathlib import Path

WATTS, MOST, CLOCK = 200_000_000, 250_000_000, 3_200_000      # microwatts, microwatts, kilohertz


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def sys_tree(folder: Path) -> Path:
    """Two packages, one's memory, the same package by another way, the whole machine, two cpufreq policies. It gives the powercap
    folder."""
    powercap = folder / "class/powercap"
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "dram"),
                       ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
        for key, text in (("name", name), ("enabled", 1), ("constraint_0_name", "long_term"),
                          ("constraint_0_power_limit_uw", WATTS), ("constraint_0_max_power_uw", MOST)):
            put(powercap / zone / key, text)
    for policy in (0, 2, 10):
        for key, text in (("scaling_max_freq", CLOCK), ("cpuinfo_min_freq", 800_000), ("cpuinfo_max_freq", CLOCK)):
            put(folder / f"devices/system/cpu/cpufreq/policy{policy}" / key, text)
    return powercap


def settings(powercap: Path) -> dict[str, int]:
    """Each limit of the tree, by zone or policy."""
    cpufreq = powercap.parents[1] / "devices/system/cpu/cpufreq"
    files = [*powercap.glob("*/constraint_0_power_limit_uw"), *cpufreq.glob("*/scaling_max_freq")]
    return {file.parent.name: int(file.read_text()) for file in files}
