"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
