"""A model as text: one line for each module, with what it was made with and the shapes of its parameters."""

from __future__ import annotations

import inspect
from typing import Any

from mpitrain.nn.parameter import Described


def printed(module: Any) -> str:
    """``Name(argument=value, weight (5, 4))``; with modules below, these on lines of their own: ``(name): ...``."""
    members = list(module._members())
    own = [f"{name}={value!r}" for name, value in _settings(module)]
    own += [f"{name} {leaf.shape}" for name, leaf in members if isinstance(leaf, Described)]
    below = [(name, part) for name, part in members if not isinstance(part, Described)]
    if not below:
        return f"{type(module).__name__}({', '.join(own)})"
    lines = [f"({name}): {part!r}".replace("\n", "\n  ") for name, part in below]
    return "\n  ".join([f"{type(module).__name__}(", *([", ".join(own)] if own else []), *lines]) + "\n)"


def _settings(module: Any) -> list[tuple[str, Any]]:
    """The arguments that are no defaults, where the module keeps them under their names."""
    kept = vars(module)
    return [(name, kept[name]) for name, argument in inspect.signature(type(module)).parameters.items()
            if name in kept and _is_plain(kept[name]) and kept[name] != argument.default]


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and all(map(_is_plain, value)))
