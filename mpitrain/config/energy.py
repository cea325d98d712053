"""[energy]: limits of the hosts for the time of a run."""
# Annotations are read as they are: no `from __future__ import annotations` here.

from dataclasses import dataclass


@dataclass(frozen=True)
class EnergyConfig:
    root: str = "/sys/class/powercap"        # where the kernel shows processor packages
    cap_watts: float = 0.0                   # power limit of each processor package; 0: as it is
    clock_mhz: float = 0.0                   # highest clock of all cores; 0: as it is
    gpu_cap_watts: float = 0.0               # power limit of each GPU; 0: as it is

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are asked for, by key."""
        return {key: value for key in ("cap_watts", "clock_mhz", "gpu_cap_watts") if (value := getattr(self, key))}
