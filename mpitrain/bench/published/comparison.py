"""Published figures beside predicted ones, and the tables that they are read from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.machines import MachineFile

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Point:
    """One figure. Its error is the difference of shares, else relative to what is published. `bar`: the largest that is wanted;
    0 where nothing is promised."""

    what: str
    unit: str
    published: float
    predicted: float
    bar: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted - self.published if self.unit == "share" else self.predicted / self.published - 1

    @property
    def within(self) -> bool:
        return not self.bar or abs(self.error) <= self.bar


@dataclass(frozen=True)
class Claim:
    """What a source says in words, whether the predictions say so too, and the figures that show it."""

    text: str
    holds: bool
    shown: str


@dataclass(frozen=True)
class Comparison:
    """A source's points and claims; `mean_bar`: the largest mean of the absolute errors of the points with a bar."""

    title: str
    source: str
    machine: MachineFile
    points: Sequence[Point]
    claims: Sequence[Claim] = field(default=())
    mean_bar: float = 0.0

    @property
    def mean_error(self) -> float:
        """Over the points with a bar, or all if none has one."""
        errors = [abs(point.error) for point in self.points if point.bar] or [abs(point.error) for point in self.points]
        return sum(errors) / len(errors) if errors else 0.0

    @property
    def largest_error(self) -> float:
        return max((abs(point.error) for point in self.points if point.bar), default=0.0)


def table(name: str) -> dict[str, Any]:
    """The data file of that name."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def by_number(values: Mapping[str, float]) -> dict[int, float]:
    """A TOML table whose keys are numbers of GPUs, in their order."""
    return dict(sorted((int(key), value) for key, value in values.items()))
