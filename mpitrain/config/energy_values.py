"""Validation of [energy]."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.config.messages import Refusal, written
from mpitrain.config.sections import Config
from mpitrain.errors import ConfigError

SHORTEST, LONGEST = 5.0, 10_000.0        # ms: counters move once a millisecond; small ones begin anew within a minute or two


def energy(config: Config) -> Iterator[Refusal]:
    e = config.energy
    if e.source == "off":
        return
    if not SHORTEST <= e.period_ms <= LONGEST:
        yield (f"energy.period_ms must lie between {written(SHORTEST)} and {written(LONGEST)}, found {written(e.period_ms)}",
               ("energy.period_ms",))
    if e.pue < 1:
        yield (f"energy.pue is what a room takes for each watt of its computers, 1 or more, found {written(e.pue)}",
               ("energy.pue",))
    missing = [key for key in ("energy.idle_watts", "energy.busy_watts") if not getattr(e, key.partition(".")[2])]
    if e.source == "model" and missing:
        yield (f'energy.source = "model" estimates from the watts of a host, idle and busy, and {missing[0]} is 0; set both: a '
               "meter at the plug tells them, or `mpitrain bench energy` where there are counters", (missing[0], "energy.source"))
    if 0 < e.busy_watts < e.idle_watts:
        yield (f"energy.busy_watts = {written(e.busy_watts)} is less than energy.idle_watts = {written(e.idle_watts)}; a host "
               "takes more with its cores at work", ("energy.busy_watts", "energy.idle_watts"))
    yield from carbon(config)


def carbon(config: Config) -> Iterator[Refusal]:
    given = config.energy.carbon_g_per_kwh
    if isinstance(given, str):
        from mpitrain.energy.carbon import intensity  # few runs ask for the table
        try:
            intensity(given)
        except ConfigError as error:
            yield error.message, ("energy.carbon_g_per_kwh",)
    elif given < 0:
        yield f"energy.carbon_g_per_kwh must be at least 0, found {written(given)}", ("energy.carbon_g_per_kwh",)
