"""The interface of a run's observers, our own and a user's: `log.observers = ["file.py:name"]`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.arguments import call
from mpitrain.errors import ConfigError, text_of
from mpitrain.registry import import_object
from mpitrain.train.intervals import Plan, Step


class Watched(NamedTuple):
    """The run as its observers see it; `tell(text)` shows a line to whoever follows the run."""

    rank: int
    size: int
    step: int                        # steps done before, by the run that this one continues
    plan: Plan
    folder: Path | None              # run folder; None if nothing is written
    tell: Callable[[str], None]
    more: dict[str, Any] = {}        # noqa: RUF012  (the trainer's own) values of the step for its line in metrics.jsonl


class Observer:
    """An observer of a run: its methods are called in the order below, and each does nothing until a subclass overrides it.

    Every rank has an observer of its own, and all are called alike: any method but `close` may communicate, on a channel
    of its own and on all ranks. Steps count from 1. Its errors end the job, as any error does, so it catches those it can do
    without. Its changes (a parameter, the learning rate) are its own affair: the run does not look.
    """

    copied_bytes = 0                 # of the copies of the weights that it keeps, for the table of memory

    def begin(self, run: Watched) -> None:
        """The run is about to start; its folder is there."""

    def before_step(self, step: int) -> None:
        """The batch is read; the rest of the step is still to come."""

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        """The parameters are updated. `fields` are equal on all ranks, `seconds` times this rank's step alone."""

    def after_evaluation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """`metrics` (loss, and accuracy for classes) cover the validation rows, equal on all ranks."""

    def before_checkpoint(self, step: int) -> None:
        """Data of the steps so far must be on the disk when this returns, or be lost with them."""

    def after_checkpoint(self, step: int) -> None:
        """The checkpoint of `step` is on the disk. Training may have gone on meanwhile, but no other one was begun."""

    def message(self, text: str) -> None:
        """Another observer, or the run, has told a line."""

    def finish(self, step: int) -> Mapping[str, Any] | None:
        """The run is over after `step`, which is less than the plan's if it was stopped; not called if it fails.

        The return value of rank 0's observer, plain JSON data by names of its own, goes into run.json if the run is done.
        """
        return {}

    def close(self) -> None:
        """Frees the resources of `begin`, also if this rank fails and others do not: it must not communicate."""


def add_data(record: dict[str, Any], found: Sequence[tuple[Observer, Any]]) -> list[str]:
    """Adds observers' data to a run.json, where they have names that are free, and values that JSON holds; a line says which
    observer's are left out, and why."""
    refused = []
    for observer, data in found:
        try:
            if data is not None and not isinstance(data, Mapping):
                raise TypeError(f"a {type(data).__name__}")
            json.dumps(data := dict(data or {}), allow_nan=False)
            twice = sorted(record.keys() & data.keys())
            why = f'returned "{twice[0]}", which the run or another observer writes; return another name' if twice else ""
        except (TypeError, ValueError) as error:
            why = (f"returned what run.json cannot hold ({text_of(error)}); return a dict from names to Python's own numbers, "
                   "texts, lists and dicts, or None")
        if why:
            refused.append(f"the observer {type(observer).__name__}: finish {why}")
        else:
            record |= data
    return refused


def own_observer(name: str, folder: Path) -> Observer:
    """An observer of `log.observers`, made; its name is that of a class or function without arguments, found from `folder`."""
    if ":" not in name:
        raise ConfigError(f'log.observers names "{name}": an observer is your own "package.module:name" or "file.py:name"')
    made = call(import_object(name, "observer", folder), f'observer "{name}"', {})
    if not isinstance(made, Observer):
        raise ConfigError(f'observer "{name}" must give an mpitrain.train.Observer, found a {type(made).__name__}')
    return made
