"""What the hosts of a run found, put together for run.json, and in one line for whoever follows the run.

A host's record, plain JSON: `host`, `joules` (None: unknown), `seconds`, `source`, `why` (unknown), `gap` (what is not counted),
`parts` (joules by zone or GPU), `phases` (joules by phase, or None), `no_phases` (why), `residual`, `samples`, `ranks`,
`known` (joules and seconds until the counter was lost).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.energy.carbon import Intensity, grams
from mpitrain.energy.phases import PHASES, PowerFit

UNKNOWN = "unknown"
NOT_YET = "unknown: no counter has moved yet"     # of a line, whose joules the first line after it has
LEAST_SHARE = 0.005               # of the joules: phases below it are in run.json, and not in the line


def phases_of(fit: PowerFit, seconds: Sequence[float]) -> tuple[dict[str, Any] | None, float, str]:
    """(joules by phase, residual, "") of a fit and the ranks' seconds in each phase; (None, 0, why not) where there is too little
    to tell."""
    solved = fit.solve()
    active = [i for i in range(fit.n) if seconds[i] > 0]
    if fit.rows < 2 * len(active):
        return None, 0.0, f"{fit.rows} readings are too few to tell {len(active)} phases apart"
    found = {}
    for i in active:
        watts, error = float(solved.watts[i]), float(solved.errors[i])
        found[PHASES[i]] = {"seconds": seconds[i], "watts": watts, "joules": watts * seconds[i],
                            "error": error * seconds[i]}
    return found, solved.residual, ""


def together(hosts: Sequence[Mapping[str, Any]], *, samples: int, seconds: float, before: float | None, idle: float, pue: float,
             carbon: Intensity | None) -> dict[str, Any]:
    """The record of a run: of `samples` in `seconds`, after the run that it continues had used `before` joules (0 where there was
    none, None: unknown). `idle` are watts of an idle host, 0: unknown."""
    known = [host for host in hosts if host["joules"] is not None]
    without = [host["host"] for host in hosts if host["joules"] is None]
    gaps = {host["host"]: host["gap"] for host in known if host["gap"]}
    own = sum(host["joules"] for host in known) if known else None
    at_least = bool(known) and (bool(without) or bool(gaps) or before is None)
    found: dict[str, Any] = {
        "joules": None if own is None else own + (before or 0.0), "at_least": at_least, "source": source_of(known),
        "joules_before": before, "without": without, "gaps": gaps,
        "joules_per_sample": own / samples if own is not None and samples else None,
        "watts": own / seconds if own is not None and seconds > 0 else None, "seconds": seconds, "samples": samples,
        "by_phase": by_phase(known), "residual": max((host["residual"] for host in known if host["phases"]), default=None),
        "by_host": [dict(host) for host in hosts],
        "baseline": None, "pue": pue, "carbon": None}
    if idle and own is not None:
        base = idle * sum(host["seconds"] for host in known)
        found["baseline"] = {"watts": idle * len(known), "joules": base, "above": own - base}
    if carbon is not None and own is not None:
        found["carbon"] = {"grams": grams(found["joules"], pue, carbon.grams), "g_per_kwh": carbon.grams, "pue": pue,
                           "country": carbon.country, "table": carbon.source, "source": found["source"]}
    return found


def source_of(known: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(host["source"] for host in known)) if known else UNKNOWN


def by_phase(known: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The sum over hosts; None where one has none. Errors of hosts are independent."""
    if not known or any(host["phases"] is None for host in known):
        return None
    found: dict[str, Any] = {}
    for phase in PHASES:
        parts = [host["phases"][phase] for host in known if phase in host["phases"]]
        if parts:
            errors = [part["error"] for part in parts]
            joules, seconds = (sum(part[key] for part in parts) for key in ("joules", "seconds"))
            found[phase] = {"seconds": seconds, "watts": joules / seconds, "joules": joules,
                            "error": math.sqrt(sum(error * error for error in errors))}
    return found


def line(found: Mapping[str, Any]) -> str:
    """The record in a line. Each number of an estimate stands behind the word."""
    if found["joules"] is None:
        return f"energy {UNKNOWN}: {'; '.join(dict.fromkeys(host['why'] for host in found['by_host']))}"
    estimate = "estimated " if "estimated" in found["source"] else ""
    numbers = [f"{'at least ' * found['at_least']}{estimate}{in_joules(found['joules'])} ({found['source']}"
               f"{', without ' + ', '.join(found['without']) if found['without'] else ''})"]
    if found["joules_per_sample"] is not None:
        numbers.append(f"{in_joules(found['joules_per_sample'])} a sample")
    if found["watts"] is not None:
        numbers.append(f"{found['watts']:,.1f} W")
    text = f"energy: {', '.join(numbers)}"
    if found["by_phase"]:
        total = sum(part["joules"] for part in found["by_phase"].values())
        shares = [f"{phase.replace('_', ' ')} {part['joules'] / total:.0%}" for phase, part in found["by_phase"].items()
                  if total and part["joules"] / total >= LEAST_SHARE]
        text += f"; {', '.join(shares)} (residual {found['residual']:.0%})"
    if found["carbon"]:
        text += (f"; {estimate}{found['carbon']['grams']:.3g} g CO2e at {found['carbon']['g_per_kwh']:g} g/kWh and a PUE of "
                 f"{found['pue']:g}")
    return text


def in_joules(joules: float) -> str:
    """``12.3 mJ``, ``1.23 J``, ``1,234 J``, ``12.3 kJ``."""
    for unit, size in (("MJ", 1e6), ("kJ", 1e4), ("J", 1.0), ("mJ", 1e-3)):
        if joules >= size:
            return f"{joules / (1e3 if unit == 'kJ' else size):,.4g} {unit}"
    return f"{joules * 1e6:.4g} uJ"
