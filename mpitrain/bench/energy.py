"""Joules of the processor packages, where the kernel lets this user read their counters (RAPL).

    /sys/class/powercap/intel-rapl:0/name                   package-0; AMD's are found here, too
    /sys/class/powercap/intel-rapl:0/energy_uj              microjoules since some time
    /sys/class/powercap/intel-rapl:0/max_energy_range_uj    where the counter begins anew
    /sys/class/powercap/intel-rapl:1/name                   psys, on laptops: the whole machine, packages included

A package counts all that its cores do, whoever's work it is. The counters are those of this node.
"""

from __future__ import annotations

import re
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
COUNTER = re.compile(r"intel-rapl:\d+")           # those of a package's parts have a further number


class Energy:
    """The counters of all packages; `why` says in words why there are none, "" where there are."""

    def __init__(self, root: Path = POWERCAP):
        self.why = ""
        self._packages: list[tuple[Path, int]] = []
        self._last: list[int] = []
        try:
            folders = sorted(folder for folder in root.iterdir() if COUNTER.fullmatch(folder.name)
                             and (folder / "name").read_text().startswith("package"))
            self._packages = [(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())) for folder in folders]
            self._last = self._counters()
        except (OSError, ValueError) as error:
            self._packages, self.why = [], f"{root} cannot be read: {getattr(error, 'strerror', None) or error}"
        if not self._packages and not self.why:
            self.why = f"{root} has no counter of a processor package"

    def joules(self) -> float | None:
        """What all packages have used since the last call, or since this object was made; None where nobody counts."""
        if not self._packages:
            return None
        now = self._counters()
        used = [(new - old) % (largest + 1) for new, old, (_, largest) in zip(now, self._last, self._packages)]
        self._last = now
        return sum(used) / 1e6

    def _counters(self) -> list[int]:
        return [int(path.read_text()) for path, _ in self._packages]
