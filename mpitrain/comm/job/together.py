"""Run on rank 0 and broadcast: its value, or the error it met, raised on every rank alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from os.path import commonprefix
from typing import Any

from mpitrain import errors
from mpitrain.comm.face import Objects
from mpitrain.errors import FIELDS, MismatchError, MpitrainError, numbered

LONGEST = 60                         # characters of a value in a message


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """The value of `action()`, or the error it met, as JSON that can be sent to other ranks."""
    try:
        return {"value": action()}
    except MpitrainError as error:
        return {"error": type(error).__name__, "code": error.code, "message": error.message,
                "where": {name: getattr(error, name) for name in FIELDS}}


def value_of(outcome: dict[str, Any]) -> Any:
    """The value that `attempt` got; its error is raised again, marked as one that all ranks raise, so that one prints it."""
    if "error" not in outcome:
        return outcome["value"]
    error = getattr(errors, outcome["error"])(outcome["message"], code=outcome["code"], **outcome["where"])
    error.mpitrain_symmetric = True
    raise error


def on_first(channel: Objects, action: Callable[[], Any]) -> Any:
    """Rank 0's value of `action()` (plain JSON data), on every rank; its error is raised on every rank too."""
    return value_of(channel.broadcast_object(attempt(action) if channel.rank == 0 else None))


def everywhere(channel: Objects, action: Callable[[], Any]) -> list[Any]:
    """The values (plain JSON data) of `action()` on every rank; where some fail, the error of the first of them is raised on
    every rank."""
    return [value_of(outcome) for outcome in channel.gather_objects(attempt(action))]


def same_everywhere(channel: Objects, own: Mapping[str, str]) -> None:
    """MismatchError, on all ranks, unless they pass equal items; it names the first that differs, the ranks and their values."""
    text = json.dumps(own)
    if len(set(channel.gather_objects(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    everyone = channel.gather_objects(own)
    names = list(dict.fromkeys(name for items in everyone for name in items))
    different = [name for name in names if len({items.get(name) for items in everyone}) > 1]
    error = MismatchError(mismatch(different, everyone))
    error.mpitrain_symmetric = True                           # type: ignore[attr-defined]
    raise error


def mismatch(different: list[str], everyone: list[dict[str, str]]) -> str:
    """The first of the items that differ, with the values that most ranks have first, and the names of some others."""
    name, ranks = different[0], dict[str, list[int]]()
    for rank, items in enumerate(everyone):
        ranks.setdefault(items.get(name, "absent"), []).append(rank)
    by_number = sorted(ranks.items(), key=lambda item: -len(item[1]))
    long = [value for value in ranks if len(value) > LONGEST]
    shared = len(commonprefix(long)) if len(long) > 1 else 0
    said = [f"{_short(value, shared)} on {numbered('rank', those)}" for value, those in by_number]
    listed = said if len(said) <= 3 else [*said[:3], f"{len(said) - 3} other values on other ranks"]
    more = f" (and {len(different) - 1} more differ: {', '.join(different[1:3])}{', ...' if len(different) > 3 else ''})"
    return (f"{name} is {', '.join(listed[:-1])} and {listed[-1]}{more if len(different) > 1 else ''}: start all ranks with one "
            "configuration, one program and one installation")


def _short(value: str, shared: int) -> str:
    """A long value from a little before the place where it differs from others, which have `shared` characters with it."""
    start = max(0, shared - LONGEST // 3) if len(value) > LONGEST else 0
    cut = value[start:start + LONGEST]
    return f"{'...' if start else ''}{cut}{'...' if start + len(cut) < len(value) else ''}"
