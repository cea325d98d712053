"""The table of models, and the check of the sizes and counts that they are built from, before anything is built of them.

Later is too late: a width of 0 would train and learn nothing, and a wrong type would fail far from its key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from mpitrain.errors import ConfigError
from mpitrain.nn import Module
from mpitrain.registry import Registry

Make = TypeVar("Make", bound=Callable[..., Module])
MODELS: Registry[Callable[..., Module]] = Registry("model")
"""Each is a function of the config's [model] keys that gives a Module."""


def of_positions(make: Make) -> Make:
    """Marks a model whose rows are (positions, inputs): the data's last dim is its `inputs`, and not all numbers of a row."""
    make.of_positions = True                                  # type: ignore[attr-defined]
    return make


def require_sizes(least: int = 1, /, **sizes: Any) -> None:
    """ConfigError unless each of these keys of [model] is an integer of at least `least`."""
    for name, value in sizes.items():
        if not _is_size(value, least):
            raise _wrong(name, f"an integer of at least {least}", value)


def require_list_of_sizes(name: str, values: Any, count: int | None = None) -> None:
    """ConfigError unless this key of [model] is a list, perhaps empty, of integers of at least 1, and of `count` of them."""
    fits = not isinstance(values, str) and isinstance(values, Sequence) and all(map(_is_size, values))
    if not fits or count not in (None, len(values)):
        raise _wrong(name, f"a list of {'' if count is None else f'{count} '}integers of at least 1", values)


def each_block(name: str, value: int | Sequence[int], layers: int) -> Sequence[int]:
    """A number for each block of a key of [model] that is one number or a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        require_list_of_sizes(name, value, layers)
        return value
    require_sizes(**{name: value})
    return [value] * layers


def require_token(vocabulary: int, /, **tokens: Any) -> None:
    """ConfigError unless each of these keys of [model] is None, or the number of a token."""
    for name, value in tokens.items():
        if value is not None and (not _is_size(value, 0) or value >= vocabulary):
            raise _wrong(name, f"a token's number, 0 to {vocabulary - 1} (model.vocabulary)", value)


def require_positive(**values: Any) -> None:
    """ConfigError unless each of these keys of [model] is a finite number above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise _wrong(name, "a finite number above 0", value)


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _wrong(name: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"model.{name} must be {expected}, found {json.dumps(value, default=str)}; change model.{name}")
