"""What `data info` and `data verify` print."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.columns import Asked, labels_of, rows_of
from mpitrain.data.probe import describe
from mpitrain.data.shards import Dataset


def info(path: Path | str, *, x: Asked | None = None, y: str | None = None) -> list[str]:
    """Lines that say what a dataset holds: kind, rows, dtypes and shapes, how it is stored, per file."""
    found = describe(path, x=x, y=y)
    shards = found["shards"]
    rows = sum(map(rows_of, shards))
    lines = [f"{found['path']}: {found['kind']}, {rows:,} {'tokens' if found['kind'] == 'tokens' else 'rows'} in {len(shards)} "
             f"file{'s' if len(shards) > 1 else ''}"]
    lines += [f"  {label}: {_dataset(shards[0][label])}" for label in labels_of(shards[0])]
    for name in ("classes", "vocabulary"):
        if found[name]:
            shown = " ".join(repr(word)[1:-1] for word in found[name][:16])
            lines.append(f"  {name}: {len(found[name])} ({shown}{' ...' if len(found[name]) > 16 else ''})")
    for name, words in (found.get("categories") or {}).items():
        lines.append(f"  categories of {name}: {words if isinstance(words, int) else len(words)}")
    checksums = sum(len(shard[label].get("sha256", [])) for shard in shards for label in labels_of(shard))
    lines.append(f"  checksums: {f'{checksums:,} blocks' if checksums else 'none (no manifest)'}")
    lines += [f"  {Path(shard['file']).name}: {rows_of(shard):,} rows, {shard['size']:,} bytes" for shard in shards]
    return lines


def _dataset(dataset: dict[str, Any]) -> str:
    shape, dtype = dataset["shape"], np.dtype(dataset["dtype"])
    row = "x".join(map(str, shape[1:])) or "scalar"
    how = dataset["storage"]
    if how == "chunked":
        stored = sum(dataset["sizes"])
        ratio = math.prod(shape) * dtype.itemsize / max(1, stored)
        how = f"chunks of {dataset['chunk'][0]} rows, {' '.join(dataset['filters']) or 'uncompressed'}, {ratio:.1f}:1"
    return f'"{dataset["name"]}" {dtype.name} rows of {row}, {how}'


def verify(path: Path | str, *, x: Asked | None = None, y: str | None = None) -> tuple[int, int]:
    """Read everything and compare every checksum: (rows, checksums compared). Raises DataError at the first that differs."""
    with closing(Dataset(describe(path, x=x, y=y))) as dataset:
        return len(dataset), dataset.verify()
