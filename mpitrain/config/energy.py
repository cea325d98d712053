"""The section of what a run counts of its energy; `energy_values` says what may stand there."""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EnergyConfig:
    source: Literal["off", "auto", "powercap", "nvml", "model"] = "off"      # "model": estimated from the watts below
    root: str = "/sys/class/powercap"        # the folder of the processors' counters
    period_ms: float = 50.0                  # between two readings
    idle_watts: float = 0.0                  # of a host that does nothing; 0: unknown
    busy_watts: float = 0.0                  # of a host with all cores at work; 0: unknown
    carbon_g_per_kwh: float | str = 0.0      # grams, or a country's two letters; 0: none are told
    pue: float = 1.0                         # what the room takes for each watt of its computers
