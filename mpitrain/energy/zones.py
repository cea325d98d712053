"""Joules of the processors of this host, from the counters that Linux keeps of them (RAPL, by the powercap interface).

    /sys/class/powercap/intel-rapl:0/name                   package-0, or package-0-die-1; AMD's are found here, too
    /sys/class/powercap/intel-rapl:0/energy_uj              microjoules since some time
    /sys/class/powercap/intel-rapl:0/max_energy_range_uj    where the counter begins anew
    /sys/class/powercap/intel-rapl:0/intel-rapl:0:0/name    core, uncore: within the package; dram: beside it
    /sys/class/powercap/intel-rapl:2/name                   psys: the whole machine, packages included
    /sys/class/powercap/intel-rapl-mmio:0/name              package-0 again, by another way

Zones are told apart by their names: their numbers are not those of packages. Those that are added up are packages (or their dies)
and the memory beside them; all others count again what these count. A package counts all that its cores do, whoever's work it
is. Since Linux 5.10 the files are root's alone (CVE-2020-8694), unless an administrator opens them.

A counter of 32 bits begins anew after some minutes, so it is read often, and the sum of the steps is kept. A step that more than
`PEAK_WATTS` would be needed for is no step: the counter was set back, or it is not known how often it began anew.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import AccessError, DataError, MissingError, MpitrainError

POWERCAP = Path("/sys/class/powercap")
PEAK_WATTS = 1000.0               # of one zone: Zeus assumes as much (device/cpu/rapl.py), and sockets of 2026 take half of it
SLACK_S = 0.1                     # a counter moves once a millisecond, and a reading may come late by more than it says
STILL_S = 10.0                    # a package that is on uses some watts: a counter that stands still so long counts nothing
DIGITS = 32                       # bytes of a file that are read: 2^64 has 20 digits
PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
OPEN_THEM = "an administrator may allow it: chmod a+r {root}/intel-rapl:*/energy_uj (root's alone since Linux 5.10)"


class Lost(Exception):
    """A counter that was there can no longer be trusted, or read; its text says why. What it would count is unknown from here."""


class Zone(NamedTuple):
    """One counter: what it counts ("package-0", "package-0 dram"), its folder, and the microjoules where it begins anew."""

    name: str
    folder: Path
    range_uj: int


class Found(NamedTuple):
    """The zones that are added up, and those that are not, with the reason."""

    added: list[Zone]
    left_out: list[tuple[str, str]]


def find_zones(root: Path = POWERCAP) -> Found:
    """The zones of a host. MissingError where there are none, DataError for a file with other content than expected, AccessError
    for one that this user may not read."""
    if not root.is_dir():
        what = "a file" if root.exists() else "nothing"
        raise MissingError(f"expected a folder of energy counters, found {what}: there is none on a virtual machine", file=root)
    added: list[Zone] = []
    left_out: list[tuple[str, str]] = []
    for folder in _numbered(root, r"intel-rapl(-mmio)?:\d+"):
        name = _text(folder / "name")
        if (reason := _why_not(folder, name, added)) is not None:
            left_out.append((f"{folder.name} ({name})", reason))
            continue
        added.append(Zone(name, folder, _range(folder)))
        for part in _numbered(folder, r"intel-rapl:\d+:\d+"):
            what = _text(part / "name")
            if what == "dram":
                added.append(Zone(f"{name} {what}", part, _range(part)))
            else:
                left_out.append((f"{part.name} ({what})", f"within {name}"))
    if not added:
        seen = f"; it has {', '.join(name for name, _ in left_out)}" if left_out else ""
        raise MissingError(f"expected the counter of a processor package (intel-rapl:0, named package-0), found none{seen}",
                           file=root)
    return Found(added, left_out)


def _why_not(folder: Path, name: str, added: list[Zone]) -> str | None:
    """Why a zone is not added up; None where it is."""
    if folder.name.startswith("intel-rapl-mmio"):
        return f"{name} again"
    if not PACKAGE.fullmatch(name):
        return "the whole machine, packages included" if name == "psys" else "no package of a processor"
    return f"{name} again" if any(zone.name == name for zone in added) else None


def _numbered(folder: Path, pattern: str) -> Iterator[Path]:
    """The folders whose names match, in the order of their numbers, as they are in the system: some are links."""
    found = [entry for entry in folder.iterdir() if re.fullmatch(pattern, entry.name)]
    yield from sorted(found, key=lambda entry: (entry.name.partition(":")[0], [int(n) for n in entry.name.split(":")[1:]]))


def _range(folder: Path) -> int:
    path = folder / "max_energy_range_uj"
    value = number(_text(path).encode(), path)
    if not value:
        raise DataError("expected a number of microjoules above 0, found 0", file=path)
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        raise refusal(error, path) from None


def number(data: bytes, path: Path) -> int:
    """The microjoules in a file. DataError where there is anything else."""
    text = data.strip()
    if not text.isdigit():
        raise DataError(f'expected a number of microjoules, found "{text.decode(errors="replace")}"', file=path)
    return int(text)


def refusal(error: OSError, path: Path) -> MpitrainError:
    """The error of a file of a zone that cannot be read."""
    if isinstance(error, PermissionError):
        root = path.parent.parent if path.parent.name.count(":") == 1 else path.parent.parent.parent
        return AccessError(f"the energy counter cannot be read: permission denied; {OPEN_THEM.format(root=root)}", file=path)
    return MissingError(f"the energy counter cannot be read: {error.strerror}", file=path)


class Powercap:
    """The counters of all zones of this host, opened once; made at the moment from which it counts.

    `clock` gives seconds, of which steps are judged. Errors as of `find_zones`.
    """

    kind, measured = "powercap", True
    lag_s = 0.0005                                # the kernel shows what the processor has, which moves once a millisecond

    def __init__(self, root: Path = POWERCAP, clock: Callable[[], float] = time.monotonic):
        self.zones, self._clock = find_zones(root).added, clock
        self.microjoules = dict.fromkeys((zone.name for zone in self.zones), 0)        # since this object was made
        self._packages = {zone.name for zone in self.zones if PACKAGE.fullmatch(zone.name)}
        self._paths = [zone.folder / "energy_uj" for zone in self.zones]
        self._files: list[int] = []
        self._last: list[int] = []
        for path in self._paths:
            try:
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._last.append(number(os.pread(self._files[-1], DIGITS, 0), path))
            except OSError as error:
                self.close()
                raise refusal(error, path) from None
            except DataError:
                self.close()
                raise
        self._at = clock()
        self._moved = [self._at] * len(self.zones)            # when each was last seen to move

    def joules(self) -> float:
        """What all zones have used since this object was made. Lost where that is not known any more."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        for i, zone in enumerate(self.zones):
            try:
                found = number(os.pread(self._files[i], DIGITS, 0), self._paths[i])
            except OSError as error:
                raise Lost(str(refusal(error, self._paths[i]))) from None
            except DataError as error:
                raise Lost(str(error)) from None
            self.microjoules[zone.name] += used(found, self._last[i], zone, seconds)
            if found != self._last[i]:
                self._moved[i] = now
            elif now - self._moved[i] > STILL_S and zone.name in self._packages:
                raise Lost(f"the counter of {zone.name} stands still at {found:,} uJ for {now - self._moved[i]:.0f} s, as on "
                           "some virtual machines")
            self._last[i] = found
        return sum(self.microjoules.values()) / 1e6

    def parts(self) -> dict[str, float]:
        """The joules of each zone at the last reading."""
        return {name: microjoules / 1e6 for name, microjoules in self.microjoules.items()}

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def used(now: int, before: int, zone: Zone, seconds: float) -> int:
    """Microjoules between two readings so far apart. Lost where fewer than `PEAK_WATTS` do not explain them, or explain one more
    turn of the counter as well."""
    most, turn = PEAK_WATTS * 1e6 * (seconds + SLACK_S), zone.range_uj + 1
    microjoules = (now - before) % turn
    if microjoules > most:
        way = "went back" if now < before else "went"
        raise Lost(f"the counter of {zone.name} {way} from {before:,} to {now:,} uJ in {seconds:.3f} s, which "
                   f"{PEAK_WATTS:,.0f} W do not explain")
    if microjoules + turn <= most:
        raise Lost(f"the counter of {zone.name} was not read for {seconds:.1f} s, in which it may have begun anew more than once")
    return microjoules


class Energy:
    """Joules between calls, for benchmarks; `why` says in words why they are not known, "" while they are."""

    def __init__(self, root: Path = POWERCAP, clock: Callable[[], float] = time.monotonic):
        self.why, self._before, self._counter = "", 0.0, None
        try:
            self._counter = Powercap(root, clock)
        except MpitrainError as error:
            self.why = str(error)

    _counter: Powercap | None

    def joules(self) -> float | None:
        """What the processors of this host have used since the last call, or since this object was made; None: unknown."""
        if self._counter is None:
            return None
        try:
            now = self._counter.joules()
        except Lost as error:
            self._counter, self.why = None, str(error)
            return None
        found, self._before = now - self._before, now
        return found
