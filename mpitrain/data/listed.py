"""What a key of the configuration lists: names, each with its arguments, or for each input by name a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.errors import ConfigError

Asked = str | Sequence[str | dict[str, Any]] | None              # names, or tables of a name and its arguments


def tables_by_input(asked: Asked) -> dict[str, Asked]:
    """What is asked for each input by name; nothing where `asked` is no table by input, which has no `name`."""
    tables = [entry for entry in ([] if asked is None or isinstance(asked, str) else asked) if isinstance(entry, dict)]
    found = {name: [own] if isinstance(own, dict) else own for table in tables for name, own in table.items()}
    is_one = len(tables) == len(list(asked or [])) and all(isinstance(own, str | list | tuple) for own in found.values())
    return found if is_one and not any("name" in table for table in tables) else {}


def entries(asked: Asked, key: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each entry: a name, or a table of a name and arguments."""
    found = []
    for entry in ([asked] if isinstance(asked, str) and asked else list(asked or [])):
        arguments = dict(entry) if isinstance(entry, dict) else {"name": entry}
        name = arguments.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f'{key}: a table is a name and its arguments, such as {{name = "scale"}}, found {entry}')
        found.append((name, arguments))
    return found
