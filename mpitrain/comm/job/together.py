"""Run on rank 0 and broadcast: its value, or the error it met, raised on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain import errors
from mpitrain.comm.face import Objects
from mpitrain.errors import FIELDS, MpitrainError


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
