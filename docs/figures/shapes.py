"""Shapes of SVG pictures in the colours of a light page and of a dark one."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

WIDTH = 840                                       # of a README on GitHub, in pixels


class Theme(NamedTuple):
    text: str
    faint: str
    line: str
    fill: str
    accent: str
    series: tuple[str, str, str, str]


THEMES = {"light": Theme("#1f2328", "#59636e", "#c4ccd5", "#f3f6f9", "#0969da", ("#0969da", "#1b9e8f", "#bf5b04", "#8250df")),
          "dark": Theme("#e6edf3", "#9aa4ae", "#4a525c", "#161b22", "#58a6ff", ("#58a6ff", "#3fb9a8", "#e8923c", "#b392f0"))}


def text(x: float, y: float, words: str, fill: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{escape(words, quote=False)}</text>")


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 6) -> str:
    return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" stroke="{stroke}" '
            'stroke-width="1.5"/>')


def line(points: Iterable[tuple[float, float]], stroke: str, width: float = 1.5, dash: str = "") -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'


def arrow(points: list[tuple[float, float]], stroke: str) -> str:
    """A line whose last part is horizontal or vertical, with a head at its end."""
    (before_x, before_y), (x, y) = points[-2:]
    dx, dy = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
    back_x, back_y = x - 8 * dx, y - 8 * dy
    head = f"{x:g},{y:g} {back_x - 4 * dy:g},{back_y - 4 * dx:g} {back_x + 4 * dy:g},{back_y + 4 * dx:g}"
    return line([*points[:-1], (back_x, back_y)], stroke) + f'<polygon points="{head}" fill="{stroke}"/>'


def picture(height: float, title: str, shapes: Iterable[str]) -> str:
    """An SVG file; `title` is what a reader hears who cannot see it."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
            f'font-family="sans-serif" role="img">\n<title>{escape(title)}</title>\n' + "\n".join(shapes) + "\n</svg>\n")
