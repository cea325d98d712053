"""Settings of this host that trade speed for energy: a processor's power limit, its highest clock, a GPU's power limit.

    /sys/class/powercap/intel-rapl:0/constraint_0_power_limit_uw     microwatts of a package, constraint_0_max_power_uw at most
    /sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq         kilohertz of the cores of a policy
    NVML's nvmlDeviceSetPowerManagementLimit                         milliwatts of a GPU

All three are `Knob`s: read, set, undo. Whoever sets one has to see to it that it is undone (`guardian`). This file runs on the
standard library, and on `nvidia-ml-py` where a GPU's limit is asked for. The other files of a tree other than /sys lie in it as
they do in /sys: powercap in class/powercap, cpufreq in devices/system/cpu/cpufreq.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import AccessError, ConfigError, MissingError, MpitrainError

POWERCAP = Path("/sys/class/powercap")
PACKAGE = re.compile(r"intel-rapl:\d+")              # AMD's packages are found here, too; parts of one have a further number
POLICY = re.compile(r"policy\d+")
LIMIT_FILE, CLOCK_FILE = "constraint_0_power_limit_uw", "scaling_max_freq"
UNKNOWN = 1 << 62                                    # the largest value where the kernel does not say one
CLOSE = 0.02                                         # a limit is rounded to what the hardware counts in (1/8 W, mostly)


class Knob(ABC):
    """A setting of this host. `before` is what held before `set`, None where nothing was set; `undo` puts it back."""

    name: str
    before: int | None = None

    @abstractmethod
    def read(self) -> int:
        """What holds now, in the knob's own unit."""

    @abstractmethod
    def refuse(self, value: int) -> None:
        """ConfigError for a value that the hardware says it cannot have."""

    @abstractmethod
    def shown(self, value: int) -> str:
        """A value with its unit."""

    @abstractmethod
    def _write(self, value: int) -> None:
        """Makes it hold. AccessError, with the administrator's command, where this user may not."""

    def set(self, value: int) -> int:
        """Sets it and gives what holds then; errors of `_write`."""
        before = self.read()
        self._write(value)
        self.before = before
        return self.read()

    def undo(self) -> None:
        """Puts back what was there, if anything was set."""
        if self.before is not None:
            self._write(self.before)
            self.before = None


class FileKnob(Knob):
    """A number in a file of the kernel. `key` is what the configuration calls it, `scale` and `unit` what is shown of it."""

    def __init__(self, path: Path, key: str, name: str, low: int, high: int, scale: float, unit: str):
        self.path, self.key, self.name, self.low, self.high, self.scale, self.unit = path, key, name, low, high, scale, unit

    def read(self) -> int:
        return number_in(self.path)

    def shown(self, value: int) -> str:
        return f"{value / self.scale:g} {self.unit}"

    def refuse(self, value: int) -> None:
        if value > self.high or value < self.low:
            bound = f"at most {self.shown(self.high)}" if value > self.high else f"at least {self.shown(self.low)}"
            raise ConfigError(f"{self.key} = {value / self.scale:g} cannot be set: {self.name} takes {bound}; set {self.key} to "
                              "that, or leave it out", file=self.path)

    def _write(self, value: int) -> None:
        try:
            with open(self.path, "r+") as file:      # the kernel's files are not made anew
                file.write(f"{value}\n")
        except OSError as error:
            raise refused(self, value, error) from None


class GpuLimit(Knob):
    """The power limit of a GPU, in milliwatts, by the functions of NVML as `nvidia-ml-py` has them."""

    key = "energy.gpu_cap_watts"

    def __init__(self, nvml: Any, handle: Any, index: int):
        self._nvml, self._handle, self.index, self.name = nvml, handle, index, f"GPU {index}"

    def read(self) -> int:
        return int(self._ask(self._nvml.nvmlDeviceGetPowerManagementLimit))

    def shown(self, value: int) -> str:
        return f"{value / 1000:g} W"

    def refuse(self, value: int) -> None:
        low, high = self._ask(self._nvml.nvmlDeviceGetPowerManagementLimitConstraints)
        if not low <= value <= high:
            bound = f"at most {self.shown(high)}" if value > high else f"at least {self.shown(low)}"
            raise ConfigError(f"{self.key} = {value / 1000:g} cannot be set: {self.name} takes {bound}; set {self.key} to that, "
                              "or leave it out")

    def _write(self, value: int) -> None:
        self._ask(self._nvml.nvmlDeviceSetPowerManagementLimit, value)

    def _ask(self, function: Callable[..., Any], *value: int) -> Any:
        try:
            return function(self._handle, *value)
        except self._nvml.NVMLError as error:
            if value and error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                raise AccessError(f"{self.name}: this user may not set its power limit ({self.key}); an administrator would: "
                                  f"sudo nvidia-smi -i {self.index} -pl {value[0] / 1000:g}, and the same with "
                                  f"{self.read() / 1000:g} after the run") from None
            raise ConfigError(f"{self.name}: its power limit cannot be {'set' if value else 'read'} by NVML ({error}); leave "
                              f"{self.key} out") from None


def number_in(path: Path) -> int:
    """ConfigError for a file of the kernel without a number in it, AccessError for one that cannot be read."""
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise AccessError(f"{error.strerror}: this user may not read it; an administrator would: sudo chmod a+r {path}",
                          file=path) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a number, found none: {getattr(error, 'strerror', None) or error}", file=path) from None


def refused(knob: FileKnob, value: int, error: OSError) -> MpitrainError:
    """A kernel's answer to a number that was written, with what to change."""
    import errno
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"this user may not set {knob.name} ({knob.key} = {value / knob.scale:g}); an administrator would: "
                           f"sudo chmod a+w {knob.path}", file=knob.path)
    if error.errno == errno.EROFS:
        return AccessError(f"{knob.key}: this file is mounted read-only, as in a container; set it on the host: echo {value} | "
                           f"sudo tee {knob.path}", file=knob.path)
    return ConfigError(f"{knob.key} = {value / knob.scale:g} was not taken by the kernel ({error.strerror}), and "
                       f"{knob.shown(knob.read())} holds; try another value", file=knob.path)


# -- what there is on this host --------------------------------------------------------------------------------------------


def power_limits(root: Path) -> list[FileKnob]:
    """The limit of each processor package under `root`, a powercap folder. MissingError without any, ConfigError for a zone that
    is switched off: its limit would hold nothing back."""
    found = []
    for zone in sorted(entries(root), key=numbered):
        if PACKAGE.fullmatch(zone.name) and text_in(zone / "name").startswith("package") and (zone / LIMIT_FILE).is_file():
            if text_in(zone / "enabled") == "0":
                raise ConfigError("energy.cap_watts: the limits of this package are switched off; an administrator would: echo "
                                  f"1 | sudo tee {zone / 'enabled'}", file=zone)
            low, high = (text_in(zone / f"constraint_0_{name}_power_uw") for name in ("min", "max"))
            found.append(FileKnob(zone / LIMIT_FILE, "energy.cap_watts", f"the power limit of {text_in(zone / 'name')}",
                                  int(low) if low.isdigit() else 1, (int(high) if high.isdigit() else 0) or UNKNOWN, 1e6, "W"))
    if not found:
        raise MissingError("energy.cap_watts: no processor package here has a power limit that can be set (a virtual machine, or "
                           "the kernel's module intel_rapl_msr is not loaded); leave it out", file=root)
    return found


def clock_limits(root: Path) -> list[FileKnob]:
    """The highest clock of each cpufreq policy in the tree of `root`, a powercap folder. MissingError without any."""
    folder = root.parent.parent / "devices/system/cpu/cpufreq"
    found = []
    for policy in sorted(entries(folder), key=numbered):
        if POLICY.fullmatch(policy.name) and (policy / CLOCK_FILE).is_file():
            low, high = number_in(policy / "cpuinfo_min_freq"), number_in(policy / "cpuinfo_max_freq")
            found.append(FileKnob(policy / CLOCK_FILE, "energy.clock_mhz", f"the highest clock of {policy.name}", low, high, 1e3,
                                  "MHz"))
    if not found:
        raise MissingError("energy.clock_mhz: the clocks of this host cannot be set (a virtual machine, or no cpufreq driver is "
                           "loaded); leave it out", file=folder)
    return found


def gpu_limits(visible: str | None, nvml: Any = None) -> list[GpuLimit]:
    """The power limits of the GPUs that CUDA_VISIBLE_DEVICES (`visible`; None: all) names. MissingError without
    `nvidia-ml-py` or a GPU."""
    nvml = nvml or imported_nvml()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        named = list(map(str, range(count))) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
        handles = [nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
                   for name in named]
        found = [GpuLimit(nvml, handle, nvml.nvmlDeviceGetIndex(handle)) for handle in handles]
    except nvml.NVMLError as error:
        raise MissingError(f"energy.gpu_cap_watts: NVML finds no GPU whose limit could be set ({error}); leave it out") from None
    if not found:
        raise MissingError("energy.gpu_cap_watts: there is no GPU here whose limit could be set; leave it out")
    return found


def imported_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise MissingError("energy.gpu_cap_watts is set by NVML, and its Python package is not installed; pip install "
                           "nvidia-ml-py") from None
    return pynvml


def knobs_of(wanted: Mapping[str, float], root: Path, visible: str | None = None) -> Iterator[tuple[Knob, int]]:
    """Each knob that `wanted` is about, and its value there: cap_watts a package, clock_mhz, gpu_cap_watts a GPU; 0: as it is."""
    found: Sequence[tuple[str, Callable[[], Sequence[Knob]], float]] = (
        ("cap_watts", lambda: power_limits(root), 1e6), ("clock_mhz", lambda: clock_limits(root), 1e3),
        ("gpu_cap_watts", lambda: gpu_limits(visible), 1e3))
    for name, knobs, scale in found:
        if wanted.get(name):
            yield from ((knob, round(wanted[name] * scale)) for knob in knobs())


def set_all(knobs: Sequence[tuple[Knob, int]], first: Callable[[], object]) -> list[str]:
    """Sets all or none; `first` is called when nothing can be refused any more for its value. A line for each, of what was there
    and what is. ConfigError where something else than was asked for would hold."""
    for knob, value in knobs:
        knob.refuse(value)
    said = []
    before = [knob.read() for knob, _ in knobs]
    first()
    try:
        for (knob, value), was in zip(knobs, before):
            now = knob.set(value)
            if abs(now - value) > CLOSE * value:
                raise ConfigError(f"{knob.name} was set to {knob.shown(value)}, and the kernel says {knob.shown(now)}; set it to "
                                  "a value that this hardware has")
            said.append(f"{knob.name} {knob.shown(was)} -> {knob.shown(now)}")
    except BaseException:
        undo_all([knob for knob, _ in knobs])
        raise
    return said


def undo_all(knobs: Sequence[Knob]) -> list[str]:
    """Puts everything back, the last one first; what could not be, in words."""
    failed = []
    for knob in reversed(knobs):
        before = knob.before
        try:
            knob.undo()
        except (MpitrainError, OSError) as error:
            failed.append(f"{knob.name} is still not {knob.shown(before or 0)} as before the run: {error}")
    return failed


def entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def text_in(path: Path) -> str:
    """What a file says; "" for one that cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def numbered(path: Path) -> tuple[int, ...]:
    """policy10 comes after policy9."""
    return tuple(map(int, re.findall(r"\d+", path.name)))
