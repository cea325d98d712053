"""The space of a study: keys of its run file, each with the values that it may take.

Each form of [space] is a `Dimension`, which maps a number u in [0, 1) to a value and lists the values of a grid:

    {log = [1e-4, 1e-1]}                 log-uniform between the two
    {uniform = [0.0, 0.5]}               uniform between the two
    {integer = [32, 256], step = 32}     each step from the first to at most the second, equally likely
    {choices = [[64], [128, 64]]}        one of the list, equally likely
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mpitrain.errors import ConfigError, nearest

Values: TypeAlias = dict[str, Any]                # a point of the space: a value for each key
WALK = 0.2                                        # the largest step of a mutation along a range, as a part of it


class Dimension(Protocol):
    """The values of one key. `count` of them, or None where they are a range of real numbers."""

    @property
    def count(self) -> int | None: ...

    def at(self, u: float) -> Any:
        """The value at `u` in [0, 1)."""

    def place(self, value: Any) -> float:
        """The u of a value: `at(place(value))` is the value, but for rounding."""

    def holds(self, value: Any) -> bool:
        """Whether it is one of the values."""

    def ends(self) -> list[Any]:
        """The ends of a range, or every choice: what is tried before a study starts."""

    def mutated(self, value: Any, u: float) -> Any:
        """Another value, near in a range, by `u` in [0, 1)."""


@dataclass(frozen=True)
class Range:
    """Real numbers from `low` to `high`, uniform in their logarithm with `log`."""

    low: float
    high: float
    log: bool
    count: int | None = None

    def at(self, u: float) -> float:
        if self.log:
            found = self.low * math.exp(u * (math.log(self.high) - math.log(self.low)))
        else:
            found = self.low + u * (self.high - self.low)
        return self.high if u >= 1 else min(found, self.high)

    def place(self, value: Any) -> float:
        if self.low == self.high:
            return 0.0
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return float((value - self.low) / (self.high - self.low))

    def holds(self, value: Any) -> bool:
        return is_number(value) and self.low <= value <= self.high

    def ends(self) -> list[Any]:
        return [self.low, self.high]

    def mutated(self, value: Any, u: float) -> float:
        moved = self.place(value) + (2 * u - 1) * WALK
        return self.at(abs(moved) if moved < 1 else 2 - moved)           # reflected at the ends


@dataclass(frozen=True)
class Steps:
    """Integers from `low` in steps to at most `high`."""

    low: int
    high: int
    step: int

    @property
    def count(self) -> int:
        return (self.high - self.low) // self.step + 1

    def at(self, u: float) -> int:
        return self.low + self.step * min(int(u * self.count), self.count - 1)

    def place(self, value: Any) -> float:
        return float(((value - self.low) // self.step + 0.5) / self.count)

    def holds(self, value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0

    def ends(self) -> list[Any]:
        return [self.low, self.low + self.step * (self.count - 1)]

    def mutated(self, value: Any, u: float) -> int:
        if self.count == 1:
            return self.low
        most, place = max(1, int(WALK * self.count)), (value - self.low) // self.step
        down, up = min(most, place), min(most, self.count - 1 - place)
        move = int(u * (down + up)) - down
        return int(value + self.step * (move if move < 0 else move + 1))


@dataclass(frozen=True)
class Choices:
    """The values of a list."""

    values: tuple[Any, ...]

    @property
    def count(self) -> int:
        return len(self.values)

    def at(self, u: float) -> Any:
        return self.values[min(int(u * self.count), self.count - 1)]

    def place(self, value: Any) -> float:
        return (self.values.index(value) + 0.5) / self.count

    def holds(self, value: Any) -> bool:
        return any(same(value, one) for one in self.values)

    def ends(self) -> list[Any]:
        return list(self.values)

    def mutated(self, value: Any, u: float) -> Any:
        others = [one for one in self.values if not same(one, value)]
        return others[int(u * len(others))] if others else value


@dataclass(frozen=True)
class Space:
    """The dimensions by key, in the order of the file."""

    dimensions: Mapping[str, Dimension]

    def __len__(self) -> int:
        return len(self.dimensions)

    def at(self, us: Sequence[float]) -> Values:
        """The point at these numbers in [0, 1), one for each key in their order."""
        return {key: dimension.at(u) for (key, dimension), u in zip(self.dimensions.items(), us, strict=True)}

    def ends(self) -> Iterator[tuple[str, Any]]:
        """Each key with each end of its range, or with each of its choices."""
        for key, dimension in self.dimensions.items():
            for value in dimension.ends():
                yield key, value

    def refuse(self, values: Any, who: str) -> Values:
        """`values` as a point of this space; ConfigError that names `who` gave them where they are none."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{who} must give a value for each key of [space], found {json.dumps(values, default=str)}")
        for key in values:
            if key not in self.dimensions:
                raise ConfigError(f'{who} gave a value for "{key}", which [space] has not{nearest(str(key), self.dimensions)}')
        for key, dimension in self.dimensions.items():
            if key not in values:
                raise ConfigError(f'{who} gave no value for "{key}" of [space]')
            if not dimension.holds(values[key]):
                raise ConfigError(f'{who} gave {json.dumps(values[key], default=str)} for "{key}", which is outside of [space]')
        return {key: plain(dimension, values[key]) for key, dimension in self.dimensions.items()}


def plain(dimension: Dimension, value: Any) -> Any:
    """A value that a dimension holds, as the journal keeps it: not [numpy.int64(64)], which equals [64]."""
    if isinstance(dimension, Choices):
        return next(one for one in dimension.values if same(one, value))
    return value


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: 1, 1.0 and true are three choices."""
    return type(a) is type(b) and a == b


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_space(table: Any) -> Space:
    """[space] as a `Space`. ConfigError for a form that is none, an empty list, a range with low above high, log of 0."""
    if not isinstance(table, dict) or not table:
        raise ConfigError('[space] must be a table of at least one key, for instance "optimizer.lr" = {log = [1e-4, 1e-1]}')
    return Space({key: dimension_of(f'[space] "{key}"', form) for key, form in flat(table)})


def flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of [space] with their forms: optimizer.lr without quotes is a table in a table to TOML."""
    for key, value in table.items():
        if isinstance(value, dict) and not before and value and all(isinstance(form, dict) for form in value.values()):
            yield from flat(value, f"{key}.")
        else:
            yield f"{before}{key}", value


def dimension_of(where: str, form: Any) -> Dimension:
    names = [name for name in FORMS if isinstance(form, dict) and name in form]
    if len(names) != 1:
        raise ConfigError(f"{where} must be one of {{log = [low, high]}}, {{uniform = [low, high]}}, {{integer = [low, high], "
                          f"step = 1}}, {{choices = [...]}}, found {json.dumps(form, default=str)}")
    name = names[0]
    known = (name, "step") if name == "integer" else (name,)
    for key in form:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}{nearest(key, known)}")
    return FORMS[name](where, form)


def bounds_of(where: str, name: str, form: Mapping[str, Any]) -> tuple[Any, Any]:
    ends = form[name]
    if not (isinstance(ends, list) and len(ends) == 2 and all(is_number(end) and math.isfinite(end) for end in ends)):
        raise ConfigError(f"{where}: {name} must be a list of two finite numbers, low and high, found "
                          f"{json.dumps(ends, default=str)}")
    low, high = ends
    if low > high:
        raise ConfigError(f"{where}: low must not be above high, found {name} = [{low}, {high}]; write [{high}, {low}]")
    return low, high


def read_log(where: str, form: Mapping[str, Any]) -> Dimension:
    low, high = bounds_of(where, "log", form)
    if low <= 0:
        raise ConfigError(f"{where}: the logarithm of {low} is not finite; a log range begins above 0, or use uniform")
    if not math.isfinite(float(high) / float(low)):
        raise ConfigError(f"{where}: the ends of log = [{low}, {high}] are too far apart, their ratio is not finite; narrow it")
    return Range(float(low), float(high), log=True)


def read_uniform(where: str, form: Mapping[str, Any]) -> Dimension:
    low, high = bounds_of(where, "uniform", form)
    if not math.isfinite(float(high) - float(low)):
        raise ConfigError(f"{where}: the ends of uniform = [{low}, {high}] are too far apart, their distance is not finite; "
                          "narrow it")
    return Range(float(low), float(high), log=False)


def read_integer(where: str, form: Mapping[str, Any]) -> Dimension:
    low, high = bounds_of(where, "integer", form)
    step = form.get("step", 1)
    for name, value in (("integer", low), ("integer", high), ("step", step)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{where}: {name} must be of integers, found {json.dumps(value, default=str)}")
    if step < 1:
        raise ConfigError(f"{where}: step must be at least 1, found {step}")
    return Steps(low, high, step)


def read_choices(where: str, form: Mapping[str, Any]) -> Dimension:
    values = form["choices"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: choices must be a list of at least one value, found {json.dumps(values, default=str)}")
    twice = next((value for i, value in enumerate(values) if any(same(value, other) for other in values[:i])), None)
    if twice is not None:
        raise ConfigError(f"{where}: choices has {json.dumps(twice, default=str)} twice; each value stands there once")
    return Choices(tuple(values))


FORMS = {"log": read_log, "uniform": read_uniform, "integer": read_integer, "choices": read_choices}
