"""Trees of files that stand for /sys/class/powercap."""

from __future__ import annotations

import os
from pathlib import Path

RANGE_UJ = 262_143_328_850               # that of many processors: 2^32 units of 61 uJ
DIGITS = 20


def zone(folder: Path, name: str, what: str, joules: float = 1.0, range_uj: int = RANGE_UJ) -> Path:
    """The folder of one zone, as the kernel has it."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "name").write_text(f"{what}\n")
    (made / "max_energy_range_uj").write_text(f"{range_uj}\n")
    set_joules(made, joules)
    return made


def set_joules(zone: Path, joules: float) -> None:
    """The counter of a zone shows so many joules, or what is left of them after it has begun anew. A thread may read it at any
    moment, so all digits are written over at once."""
    range_uj = int((zone / "max_energy_range_uj").read_text())
    file = os.open(zone / "energy_uj", os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, f"{int(joules * 1e6) % (range_uj + 1):0{DIGITS}}\n".encode(), 0)
    os.close(file)
