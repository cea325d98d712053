"""The memory report in words: predicted, beside what was measured; and tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.placement.bytes import Forecast, Use


def forecast_lines(found: Forecast) -> Iterator[str]:
    """A table with a row for each stage."""
    names = _names(found.stages)
    yield "memory of a rank in MiB, predicted" + (f" (activations are not: {found.why})" if found.why else "")
    yield from table(("stage", *names), [(str(stage), *(_mib(getattr(use, name)) for name in names))
                                         for stage, use in enumerate(found.stages)])
    if found.kept_for_a_row is not None:
        yield f"  a row of a micro-batch keeps {found.kept_for_a_row / 2**10:,.1f} KiB for backward"


def report_lines(found: Forecast, everyone: Sequence[tuple[int, Use]]) -> Iterator[str]:
    """Predicted beside measured, for each stage's rank with the most memory; `everyone` is (stage, use) of all ranks."""
    names = _names([*found.stages, *(use for _, use in everyone)])
    rows = []
    for stage, predicted_use in enumerate(found.stages):
        rank = max((rank for rank, (where, _) in enumerate(everyone) if where == stage), key=lambda r: _sum(everyone[r][1]))
        use = everyone[rank][1]
        rows.append((str(stage), str(rank), *(f"{_mib(getattr(predicted_use, name))} / {_mib(getattr(use, name))}"
                                              for name in names)))
    yield "memory of a rank in MiB, predicted / measured" + (f" (activations were not predicted: {found.why})" if found.why
                                                             else "")
    yield from table(("stage", "rank", *names), rows)


def as_json(found: Forecast, everyone: Sequence[tuple[int, Use]]) -> dict[str, Any]:
    """Bytes: predicted of each stage, measured of each rank."""
    return {"predicted": [{"stage": stage, **use._asdict()} for stage, use in enumerate(found.stages)],
            "measured": [{"rank": rank, "stage": stage, **use._asdict()} for rank, (stage, use) in enumerate(everyone)]}


def _names(uses: Sequence[Use]) -> list[str]:
    seldom = ("offloaded", "copies", "residuals", "levels")
    return [name for name in Use._fields if name not in seldom or any(getattr(use, name) for use in uses)]


def _sum(use: Use) -> int:
    return sum(n or 0 for n in use)


def _mib(n: int | None) -> str:
    return "-" if n is None else f"{n / 2**20:,.2f}"


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
