"""What a rule of the configuration yields, and values as its messages show them: as TOML."""

from __future__ import annotations

from mpitrain.files.toml import toml as toml

Refusal = tuple[str, tuple[str, ...]]    # the message, and the keys it is about


def written(value: float | str) -> str:
    """A value as somebody wrote it: 0 for the 0.0 that it became."""
    return toml(value).removesuffix(".0")
