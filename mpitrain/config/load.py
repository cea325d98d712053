"""A run is one TOML file; ``section.key=value`` on the command line overrides it; both are checked before anything starts."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import datetime
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mpitrain.config.messages import toml
from mpitrain.config.sections import DEFAULTS_OF, DEFAULTS_OF_SCHEDULES, OPEN, SECTIONS, Config, Origin, keys_of
from mpitrain.config.values import check_values
from mpitrain.errors import AccessError, ConfigError, MissingError, nearest

BUILT_IN = Path(__file__).parents[1] / "digits.toml"
OF_A_STUDY = ("search", "space")     # sections of a study, which `search` reads
LARGEST_FILE = 1 << 20               # bytes; the longest that is known, with a plan for each layer, has 20 kB
DEEPEST = 32                         # lists and tables inside each other; what recurses into values bears a thousand
TOO_DEEP = f"lists and tables stand more than {DEEPEST} deep inside each other"


def load_config(path: Path | None, overrides: list[str]) -> Config:
    """The configuration in `path` (the built-in digits run for None) with ``section.key=value`` overrides on top.

    Raises ConfigError naming the file and the key, MissingError where there is no such file.
    """
    config = _load(path if path is not None else BUILT_IN, overrides, path.resolve().parent if path is not None else Path.cwd())
    config.refuse_without_data()
    return config


def load_run(folder: Path, overrides: list[str]) -> Config:
    """The configuration that a run folder keeps, with overrides on top; errors as of `load_config`. A run that was made of a
    model, and not trained, may have no data."""
    if not (folder / "config.toml").is_file():
        raise MissingError("expected a run folder with a config.toml", file=folder)
    return _load(folder / "config.toml", overrides, (folder / "config.toml").resolve().parent)


def made_config(tables: Mapping[str, Any], overrides: list[str], name: str) -> Config:
    """The configuration of a run that has no file: of tables, with overrides on top. The run is called `name`, and finds the
    user's code from the working folder."""
    return _config(copy.deepcopy(dict(tables)), overrides, Path(name), Path.cwd())


def _load(source: Path, overrides: list[str], folder: Path) -> Config:
    tables = read_tables(source)
    for name in OF_A_STUDY:
        if name in tables:
            raise ConfigError(f"[{name}] makes this file a study of many runs: start it with search "
                              f"(mpirun -n 2 python -m mpitrain search {source.name})", file=source)
    return config_of(tables, overrides, source, folder)


def config_of(tables: dict[str, Any], overrides: list[str], source: Path, folder: Path) -> Config:
    """The configuration of the tables of the file `source`, which are changed, with overrides on top; data and code are found
    from `folder`. Errors as of `load_config`."""
    if isinstance(tables.get("sync"), list):                  # [[sync]], as often as there are levels; overrides name the key
        tables["sync"] = {"levels": tables["sync"]}
    for name, table in tables.items():
        _section(name, table, source)        # the file by itself first: a message names the file or the command line, not both
    return _config(tables, overrides, source, folder)


def _config(tables: dict[str, Any], overrides: list[str], source: Path, folder: Path) -> Config:
    if isinstance(tables.get("sync"), list):             # [[sync]], of which the command line may give sync.levels anew
        tables["sync"] = {"levels": tables["sync"]}
    overridden = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        _apply(tables, override, overridden)
    own = tables.get("optimizer", {})
    defaults = DEFAULTS_OF.get(own.get("name"), {}) | DEFAULTS_OF_SCHEDULES.get(own.get("schedule"), {})
    tables |= {"optimizer": defaults | own} if defaults else {}
    config = Config(**{name: _section(name, table, None) for name, table in tables.items()})
    name = config.run.name or source.stem
    run = dataclasses.replace(config.run, name=name, folder=config.run.folder or str(folder),
                              out=config.run.out or f"runs/{name}")
    config = dataclasses.replace(config, run=run, origin=Origin(source, frozenset(overridden)))
    if not config.model.name:
        raise config.wrong('model.name is missing: for instance "mlp", "lenet", "gpt", or your own "file.py:function"',
                           ("model.name",))
    check_values(config)
    return config


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a file, as they stand there. MissingError, AccessError or ConfigError where they cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ConfigError(f"a configuration has at most {LARGEST_FILE:,} bytes, and this file has more", file=path)
        return _parsed(text.decode("utf-8-sig"))          # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise MissingError("no such configuration file", file=path) from None
    except PermissionError:
        raise AccessError("the configuration file cannot be read: permission denied", file=path) from None
    except IsADirectoryError:
        raise ConfigError("expected a TOML file, found a folder", file=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=path) from None
    except RecursionError:
        raise ConfigError(TOO_DEEP, file=path) from None


def _parsed(text: str) -> dict[str, Any]:
    """The tables of a text in TOML; RecursionError where they are deeper than anyone writes by hand."""
    tables = tomllib.loads(text)
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        level = [value for container in level for value in (container.values() if isinstance(container, dict) else container)
                 if isinstance(value, (dict, list))]
    if level:
        raise RecursionError
    return tables


def _apply(tables: dict[str, Any], override: str, all_keys: set[str]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f'an override is section.key=value, for instance train.steps=100; found "{override}"')
    try:
        value = _parsed(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text                         # a bare word is a string
    except RecursionError:
        raise ConfigError(f"on the command line: {key}: {TOO_DEEP}") from None
    _section(section, {name: value}, None)
    tables.setdefault(section, {})[name] = value
    for one, other in (("steps", "epochs"), ("epochs", "steps")):      # the command line gives the run's length anew
        if key == f"train.{one}" and f"train.{other}" not in all_keys:
            tables["train"].pop(other, None)


def _wrong(source: Path | None, message: str) -> ConfigError:
    """A mistake in the file `source`, or (None) on the command line."""
    return ConfigError(message, file=source) if source else ConfigError(f"on the command line: {message}")


def _section(name: str, table: Any, source: Path | None) -> Any:
    if name not in SECTIONS:
        raise _wrong(source, f'unknown section [{name}]{nearest(name, SECTIONS)}')
    kind = type(SECTIONS[name])
    if name == "sync" and isinstance(table, list):       # [[sync]], as often as there are levels
        table = {"levels": table}
    if not isinstance(table, dict):
        raise _wrong(source, f"[{name}] must be a table of keys, found {_show(table)}")
    known = keys_of(name)
    if name in OPEN and "arguments" in table:
        raise _wrong(source, f"unknown key {name}.arguments: arguments of what [{name}] names are keys of [{name}] themselves")
    values = {"arguments": {key: table[key] for key in table if key not in known}} if name in OPEN else {}
    for key, value in table.items():
        if key in values.get("arguments", ()):
            continue
        if key not in known:
            raise _wrong(source, f"unknown key {name}.{key}{nearest(key, known)}")
        try:
            values[key] = convert(f"{name}.{key}", value, known[key])
        except ConfigError as error:
            raise _wrong(source, str(error)) from None
    return kind(**values)


def convert(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type the key wants: an int serves as a float, a single string as a list of one. ConfigError else."""
    options = kinds_of(hint)
    for option in options:
        base = typing.get_origin(option) or option
        if base is tuple:
            kinds = [typing.get_origin(kind) or kind for kind in kinds_of(typing.get_args(option)[0])]
            found = [[kind(x) for kind in kinds if _is(x, kind)] for x in (value if isinstance(value, list) else [value])]
            if all(found):
                return tuple(x for x, *_ in found)
        elif _is(value, base):
            return base(value)
    raise ConfigError(f"{key} must be {' or '.join(_name(o) for o in options)}, found {_show(value)}")


def kinds_of(hint: Any) -> list[Any]:
    """The types that a value in a file may have: words are strings, and functions are named."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [str if typing.get_origin(option) is Literal else option for option in (typing.get_args(hint) if union else (hint,))
            if typing.get_origin(option) is not collections.abc.Callable]


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, (str, datetime.date, datetime.time))         # a bare 2026-11-22 is a word too
    return isinstance(value, kind)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        kinds = [_name(kind).partition(" ")[2] + "s" for kind in kinds_of(typing.get_args(hint)[0])]
        return f"a list of {' or '.join(kinds)}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table", list: "a list",
             datetime.datetime: "a date and time", datetime.date: "a date", datetime.time: "a time"}         # all types of TOML
    return names[typing.get_origin(hint) or hint]


def _show(value: Any) -> str:
    return f"{json.dumps(value, default=str)} ({_name(type(value))})"


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `load_config` reads back to the same values."""
    lines = []
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        values |= values.pop("arguments", {})
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)
