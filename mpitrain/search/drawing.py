"""Plots as SVG text: axes, and marks between them. No library draws them, so a report is one file that needs none.

A `Scale` maps values to points of the page; a `Plot` collects marks and closes with its axes around them. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))      # viridis, at five places
WORST, MUTED, LINE = "#c0392b", "#9aa0a6", "#3b528b"
LOG_FROM = 30.0                           # values that span so many times their smallest are drawn on a logarithmic axis


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high`, or `names`, to points from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False
    names: tuple[str, ...] = ()
    marks: tuple[float, ...] = ()            # where the ticks are, if somebody has said it

    def at(self, value: Any) -> float:
        if self.names:
            share = (self.names.index(str(value)) + 0.5) / len(self.names)
        elif self.low == self.high:
            share = 0.5
        else:
            low, high, number = (math.log(one) if self.log else one for one in (self.low, self.high, float(value)))
            share = (number - low) / (high - low)
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(point, text) of a few values."""
        if self.names:
            return [(self.at(name), name if len(name) < 18 else name[:16] + "..") for name in self.names]
        if self.marks or self.low == self.high:
            return [(self.at(value), number_text(value)) for value in self.marks or (self.low,)]
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            values = [10.0 ** power for power in powers]
            if len(values) < 2:
                values = [self.low, self.high]
        else:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
            step = next(step * factor for factor in (1, 2, 5, 10, 20) if (self.high - self.low) / (step * factor) <= 5)
            first = math.ceil(self.low / step - 1e-9)
            values = [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(self.at(value), number_text(value)) for value in values]


def scale_of(values: Sequence[Any], first: float, last: float, *, log: bool | None = None, room: float = 0.0,
             marks: Sequence[float] = ()) -> Scale:
    """The scale of some values: by their names unless all are numbers, logarithmic where they span much (`log`: as it says).
    `room` is left at both ends, as a part of the extent."""
    if not values or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return Scale(0, 0, first, last, names=tuple(dict.fromkeys(map(str, values))) or ("-",))
    low, high = float(min(values)), float(max(values))
    wide = low > 0 and high / low >= LOG_FROM
    logarithmic = wide if log is None else log and low > 0
    if logarithmic and high > low:
        factor = (high / low) ** room
        low, high = low / factor, high * factor
    elif high > low:
        low, high = low - room * (high - low), high + room * (high - low)
    return Scale(low, high, first, last, logarithmic, marks=tuple(marks))


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and value % 1 == 0 and abs(value) < 1e7 else f"{value:.4g}"


def colour(share: float) -> str:
    """A colour of the ramp for 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    mixed = (a + (b - a) * (place - index) for a, b in zip(RAMP[index], RAMP[index + 1]))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


class Plot:
    """A drawing of `width` x `height` points; marks are added, and `text` gives the SVG."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self._marks: list[str] = []

    def circle(self, x: float, y: float, fill: str, told: str, *, radius: float = 4, ring: bool = False) -> None:
        edge = ' stroke="currentColor" stroke-width="2"' if ring else ""
        self._marks.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}"{edge}><title>{escape(told)}</title></circle>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str, told: str = "", *, width: float = 1.2,
             opacity: float = 1.0) -> None:
        at = " ".join(f"{x},{y}" for x, y in points)
        title = f"<title>{escape(told)}</title>" if told else ""
        self._marks.append(f'<polyline points="{at}" fill="none" stroke="{stroke}" stroke-width="{width}" opacity="{opacity}">'
                           f"{title}</polyline>")

    def bar(self, x: float, y: float, width: float, height: float, fill: str, told: str) -> None:
        self._marks.append(f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{height}" fill="{fill}">'
                           f"<title>{escape(told)}</title></rect>")

    def word(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._marks.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def horizontal(self, scale: Scale, y: float, label: str) -> None:
        """The axis below."""
        self.line([(scale.first, y), (scale.last, y)], MUTED)
        for x, text in scale.ticks():
            self.line([(x, y), (x, y + 4)], MUTED)
            self.word(x, y + 16, text, "middle")
        self.word((scale.first + scale.last) / 2, y + 32, label, "middle")

    def vertical(self, scale: Scale, x: float, label: str, *, above: bool = True) -> None:
        """An axis at the left, or one of several."""
        self.line([(x, scale.first), (x, scale.last)], MUTED)
        for y, text in scale.ticks():
            self.line([(x - 4, y), (x, y)], MUTED)
            self.word(x - 6, y + 4, text, "end")
        self.word(x, min(scale.first, scale.last) - 8 if above else max(scale.first, scale.last) + 18, label, "middle")

    def text(self) -> str:
        return (f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
                f'aria-label="{escape(self.title, quote=True)}">{"".join(self._marks)}</svg>')
