"""Values as TOML, which Python reads and does not write."""

from __future__ import annotations

import json
from typing import Any


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):               # a TOML basic string is a JSON string but for two escapes JSON lacks
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
