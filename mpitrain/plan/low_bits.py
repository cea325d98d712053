"""What `quantize` did to each layer, as a table; it is kept in run.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.plan.memory_lines import table


def table_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """The layers in few bits, and a line for each one that stays in floats, of run.json's `made`."""
    rows = [(row["path"], row["format"], f"{row['bytes_before']:,}", f"{row['bytes_after']:,}", f"{row['error']:.2%}")
            for row in made["layers"]]
    yield from table(("layer", "format", "bytes before", "after", "error of the weight"), rows)
    for path, why in made["left"].items():
        yield f"{path} stays in floats: {why}"
