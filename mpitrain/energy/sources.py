"""Which counter a host has, and what the hosts of a run make of theirs together.

    "powercap"   processors and memory beside them        "auto"   what there is: processors, and GPUs where the run is on GPUs;
    "nvml"       GPUs                                               without any counter on any host an estimate, where the watts
    "model"      an estimate                                        of a host are given

Estimates are never added to what was measured: where one host has a counter, the others' energy is unknown, and the sum "at
least".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpitrain.energy.estimate import Model, words
from mpitrain.energy.reader import Counter, Several
from mpitrain.energy.zones import POWERCAP, Powercap
from mpitrain.errors import MpitrainError


class Asked(NamedTuple):
    """What [energy] asks of a host: the source, the folder of counters, the watts of a host idle and busy."""

    source: str
    root: Path = POWERCAP
    idle: float = 0.0
    busy: float = 0.0


class Opened(NamedTuple):
    """A host's counter, or the error that says why there is none; `gap` says what of its energy is not in the counter."""

    counter: Counter | None
    error: MpitrainError | None
    gap: str = ""


def open_counters(asked: Asked, gpus: Sequence[str] = ()) -> Opened:
    """What this host can measure; `gpus` are the addresses of those that the run computes on."""
    found: list[Counter] = []
    errors: list[MpitrainError] = []
    if asked.source in ("auto", "powercap"):
        try:
            found.append(Powercap(asked.root))
        except MpitrainError as error:
            errors.append(error)
    if asked.source == "nvml" or (asked.source == "auto" and gpus):
        from mpitrain.energy.nvml import Gpus  # few runs are on GPUs
        try:
            found.append(Gpus(gpus))
        except MpitrainError as error:
            errors.append(error)
    if not found:
        return Opened(None, errors[0] if errors else None)
    gap = f"the {'processors' if found[0].kind == 'nvml' else 'GPUs'} are not counted: {errors[0].message}" if errors else ""
    return Opened(found[0] if len(found) == 1 else Several(found), None, gap)


def estimated(asked: Asked, pids: Sequence[int]) -> Model:
    """The estimate of a host whose ranks are the processes `pids`."""
    return Model(asked.idle, asked.busy, pids)


def source_words(asked: Asked, kind: str) -> str:
    """What stands beside each number: measured or estimated, and by what."""
    return words(asked.idle, asked.busy) if kind == "model" else f"measured ({kind})"
