"""What `quantize` did to each layer, as a table; it is kept in run.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.plan.memory_lines import table


def table_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """The layers in few bits, and a line for each one that stays in floats, of run.json's `made`."""
    measured = made.get("measured_rows")
    heads = ("layer", "format", "bytes before", "after", "error of the weight", "of the output",
             *([f"gain, {measured} rows" if measured > 1 else "gain, 1 row"] if measured else []))
    rows = [(row["path"], row["format"], f"{row['bytes_before']:,}", f"{row['bytes_after']:,}", f"{row['error']:.2%}",
             _known(row.get("output_error"), ".2%"), *([_known(row.get("gain"), ".2f")] if measured else []))
            for row in made["layers"]]
    yield from table(heads, rows)
    for path, why in made["left"].items():
        yield f"{path} stays in floats: {why}"


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
