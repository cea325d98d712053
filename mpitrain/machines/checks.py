"""What the numbers of a machine file have to be: single ones, and the tables that `bench fit` writes, which plans rely on.

    [measured]
    operation_s = seconds                                                   contention = {ranks = [...], training = [...], ...}
    by_ranks = {"1" = {step_s, turns}, "2" = {step_s, turns, collective_s, shared, messages, layers, stage_messages}, ...}
    between = {alpha, beta, gamma, points, step_s, overlap}; also at_once   points: [[bytes, seconds], ...], bytes rising
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files.toml import toml

AGAIN = "correct it, or let bench fit --out write the file anew"
SHOWN = 60                    # letters of a value in a message: a table has thousands


def number(value: Any, where: str, file: Path | None, *, positive: bool = False) -> None:
    least = "above 0" if positive else "0 or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where} is {shown(value)}; it should be a number, {least}", file=file)
    if not 0 <= value < inf or (positive and value == 0):
        raise ConfigError(f"{where} is {value}; it should be a number, {least}", file=file)


def shown(value: Any) -> str:
    text = toml(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_measured(measured: Mapping[str, Any], file: Path | None) -> None:
    """ConfigError for tables of measurements that a plan would misread. One that is left out is fine: nobody measured it."""
    if "operation_s" in measured:
        number(measured["operation_s"], "operation_s of [measured]", file)
    if "contention" in measured:
        _check_contention(_table(measured, "contention", "[measured]", file), file)
    if "by_ranks" in measured:
        by_ranks = _table(measured, "by_ranks", "[measured]", file)
        for key in by_ranks:
            if not (key.isascii() and key.isdigit() and int(key)):
                raise ConfigError(f'by_ranks of [measured] has the key "{key}"; a number of ranks was expected; {AGAIN}',
                                  file=file)
            _check_ranks(_table(by_ranks, key, "by_ranks", file), int(key), file)
        if by_ranks and max(map(int, by_ranks)) < 2 and "between" not in measured:       # a rank on each of several hosts
            raise ConfigError(f"by_ranks of [measured] has nothing of two or more ranks; {AGAIN}", file=file)
    if "between" in measured:
        between = _table(measured, "between", "[measured]", file)
        _check_costs(between, "between of [measured]", file)
        _numbers(between, ("step_s", "overlap", *(["at_once"] if "at_once" in between else [])), "between of [measured]", file)
        _numbers(measured, ("nodes",), "[measured]", file)


def _check_ranks(found: Mapping[str, Any], ranks: int, file: Path | None) -> None:
    where = f"by_ranks.{ranks} of [measured]"
    _numbers(found, ("step_s", "turns", *(("collective_s",) if ranks > 1 else ())), where, file)
    for way in ("shared", "messages") if ranks > 1 else ():
        _check_costs(_table(found, way, where, file), f"{way} of {where}", file)
    if "stage_messages" in found:
        _check_points(found["stage_messages"], f"stage_messages of {where}", file)
    if "layers" in found:
        for group, points in _table(found, "layers", where, file).items():
            _check_points(points, f"layers.{group} of {where}", file)


def _check_costs(costs: Mapping[str, Any], where: str, file: Path | None) -> None:
    _numbers(costs, ("alpha", "beta", "gamma"), where, file)
    _check_points(costs.get("points"), f"points of {where}", file)


def _check_points(points: Any, where: str, file: Path | None) -> None:
    """A curve is read in logarithms, between two of its points."""
    if not (isinstance(points, list) and points and all(isinstance(point, list) and len(point) == 2 for point in points)):
        raise ConfigError(f"{where} is {shown(points)}; it should be a list of [bytes, seconds]; {AGAIN}", file=file)
    for point in points:
        for value in point:
            number(value, f"a number of {where}", file, positive=True)
    if any(one[0] >= other[0] for one, other in pairwise(points)):
        raise ConfigError(f"the bytes of {where} do not rise; {AGAIN}", file=file)


def _check_contention(table: Mapping[str, Any], file: Path | None) -> None:
    where = "contention of [measured]"
    ranks = table.get("ranks")
    if not (isinstance(ranks, list) and ranks and all(isinstance(n, int) and n > 0 for n in ranks)):
        raise ConfigError(f"ranks of {where} is {shown(ranks)}; it should be a list of numbers of ranks; {AGAIN}", file=file)
    for kind in ("memory", "training"):
        values = table.get(kind)
        if not isinstance(values, list) or len(values) != len(ranks):
            raise ConfigError(f"{kind} of {where} is {shown(values)}; it should be a list with a number for each of ranks = "
                              f"{shown(ranks)}; {AGAIN}", file=file)
        for value in values:
            number(value, f"a number of {kind} of {where}", file, positive=True)


def _table(table: Mapping[str, Any], key: str, where: str, file: Path | None) -> Mapping[str, Any]:
    found = table.get(key)
    if not isinstance(found, dict):
        raise ConfigError(f"{key} of {where} is {shown(found)}; it should be a table; {AGAIN}", file=file)
    return found


def _numbers(table: Mapping[str, Any], keys: tuple[str, ...], where: str, file: Path | None) -> None:
    for key in keys:
        if key not in table:
            raise ConfigError(f"{key} of {where} is missing; {AGAIN}", file=file)
        number(table[key], f"{key} of {where}", file)
