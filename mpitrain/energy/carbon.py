"""Grams of CO2 equivalents of some joules: joules at the plug of a machine room, times what a kilowatt-hour costs there.

    grams = joules / 3.6e6 * pue * grams a kWh

`pue` (power usage effectiveness) is what the room takes for each watt of its computers: 1.0 for none, 1.1 to 1.6 are usual. The
table by country is carbon.toml, with its source and years.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError

JOULES_A_KWH = 3.6e6
TABLE = Path(__file__).with_name("carbon.toml")


class Intensity(NamedTuple):
    """Grams for a kilowatt-hour, and where that number is from."""

    grams: float
    country: str                                  # "" where the user gave the number
    source: str


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())


def intensity(given: float | str) -> Intensity | None:
    """That of a number, or of a country's two letters; None for 0, where nothing is told. ConfigError for an unknown country."""
    if isinstance(given, str):
        countries = table()["countries"]
        found = countries.get(given.upper())
        if found is None:
            raise ConfigError(f'energy.carbon_g_per_kwh = "{given}" is no country of the table{_nearest(given, countries)}; give '
                              "its two letters, or grams")
        return Intensity(float(found["grams"]), given.upper(), f"{table()['source']}, {found['name']} {found['year']}")
    return Intensity(given, "", "energy.carbon_g_per_kwh") if given else None


def _nearest(given: str, countries: Mapping[str, Any]) -> str:
    """`` (did you mean "DE" for Germany?)``: the closest by name or letters."""
    import difflib  # few runs have a mistake
    names = {entry["name"].lower(): code for code, entry in countries.items()}
    close = [names[name] for name in difflib.get_close_matches(given.lower(), names, n=1)] \
        or difflib.get_close_matches(given.upper(), [code for code in countries if code[0] == given[:1].upper()], n=1, cutoff=0.4)
    return "".join(f' (did you mean "{code}" for {countries[code]["name"]}?)' for code in close) or \
        f" (known: {', '.join(countries)})"


def grams(joules: float, pue: float, grams_a_kwh: float) -> float:
    return joules / JOULES_A_KWH * pue * grams_a_kwh
