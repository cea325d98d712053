"""The section of a run's energy: what is counted, and what limits its hosts have meanwhile; `energy_values` says what may stand
there."""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EnergyConfig:
    source: Literal["off", "auto", "powercap", "nvml", "model"] = "off"      # "model": estimated from the watts below
    root: str = "/sys/class/powercap"        # where the kernel shows processor packages
    period_ms: float = 50.0                  # between two readings
    idle_watts: float = 0.0                  # of a host that does nothing; 0: unknown
    busy_watts: float = 0.0                  # of a host with all cores at work; 0: unknown
    carbon_g_per_kwh: float | str = 0.0      # grams, or a country's two letters; 0: none are told
    pue: float = 1.0                         # what the room takes for each watt of its computers
    cap_watts: float = 0.0                   # power limit of each processor package; 0: as it is
    clock_mhz: float = 0.0                   # highest clock of all cores; 0: as it is
    gpu_cap_watts: float = 0.0               # power limit of each GPU; 0: as it is

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are asked for, by key."""
        return {key: value for key in ("cap_watts", "clock_mhz", "gpu_cap_watts") if (value := getattr(self, key))}
