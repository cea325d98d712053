"""The tables of [[sync]]: over whom ranks meet, how often, with what, and what they do with it."""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mpitrain.arguments import call_with
from mpitrain.config.load import convert
from mpitrain.config.messages import toml, written
from mpitrain.config.sections import Config
from mpitrain.config.topology import OUTER
from mpitrain.errors import ConfigError, nearest


@dataclass(frozen=True)
class Level:
    """One table. Keys that are not here are the outer rule's, in `arguments`."""

    over: Literal["node", "site", "workers"] = "site"        # ranks that share memory, those of mesh.site, or clients
    every: int | str = 1                     # steps, or "5 epochs"
    after: int = 0                           # steps before the first of these, which meet each time
    what: Literal["gradients", "parameters"] = "parameters"
    outer: str = "average"                   # one of OUTER; or the user's own, "file.py:name"
    lr: float = 1.0                          # of the outer rule
    compress: str = ""                       # one of COMPRESSORS, for what travels; "": float32
    fragments: int = 1                       # parts of the model that leave one after the other
    delay: int = 0                           # steps between leaving and taking effect
    alpha: float = 1.0                       # share of what has arrived, in the mean with what a worker has by then
    graph: str = ""                          # one of GRAPHS: neighbours alone meet; "": all do
    arguments: dict[str, Any] = field(default_factory=dict)


MOST = {"lr": 1e9, "alpha": 1.0}
LEAST = {"after": 0, "fragments": 1, "delay": 0}
KNOWN: dict[str, Any] = {f.name: f.type for f in fields(Level) if f.name != "arguments"}


def levels_of(config: Config) -> list[Level]:
    """The levels of a configuration, from the inside out. ConfigError for a key or a value that may not stand there."""
    return [_level(config, table) for table in config.sync.levels]


def _level(config: Config, table: dict[str, Any]) -> Level:
    try:
        given = {key: _value(key, value) for key, value in table.items() if key in KNOWN}
        if "arguments" in table:
            raise ConfigError("[[sync]] has no key arguments: those of the outer rule are keys of the table themselves")
    except ConfigError as error:
        raise config.wrong(error.message, ("sync.levels",)) from None
    return Level(**given, arguments={key: value for key, value in table.items() if key not in KNOWN})


def _value(key: str, value: Any) -> Any:
    """The value of a key that every level has, as its type. ConfigError for one that may not stand there."""
    found = convert(f"sync.{key}", value, KNOWN[key])
    words = get_args(KNOWN[key]) if get_origin(KNOWN[key]) is Literal else ()
    if words and found not in words:
        raise ConfigError(f'sync.{key} = "{found}" is not there{nearest(found, words)}')
    if key in LEAST and found < LEAST[key]:
        raise ConfigError(f"sync.{key} must be at least {LEAST[key]}, found {found}")
    if key == "every" and not (found >= 1 if isinstance(found, int) else _is_epochs(found)):
        raise ConfigError(f'sync.every must be a number of steps, at least 1, or epochs, "5 epochs", found {toml(found)}')
    if key in MOST and not 0.0 < found <= MOST[key]:
        raise ConfigError(f"sync.{key} must be more than 0, at most {MOST[key]:g}, found {written(found)}")
    return found


def _is_epochs(every: str) -> bool:
    count, _, word = every.partition(" ")
    return count.isdecimal() and int(count) >= 1 and word in ("epoch", "epochs")


def make_outer(name: str, lr: float, arguments: Mapping[str, Any], folder: Path | None = None) -> Any:
    """The outer rule of a level, an `optim.outer.OuterRule`. ConfigError for a name or a key that is not there."""
    return call_with(OUTER.resolve(name, folder), {"lr": lr, **arguments}, f'outer = "{name}"', "sync")
