"""What a device would have been asked for: launches by name, waits of the host, bytes up and down. The stand-in notes them.

A launch is counted as CuPy makes them: one for an operation of each element or a sum, none for a view, a copy for each operand of
a batched product that has gaps. Where CuPy makes more in some cases, the number is the least it makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Counts:
    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    up: int = 0
    down: int = 0

    @property
    def n_launches(self) -> int:
        return self.launches.total()

    @property
    def n_syncs(self) -> int:
        return self.syncs.total()


_open: list[Counts] = []
VIEWS = frozenset(("broadcast_to", "swapaxes", "transpose", "moveaxis", "squeeze", "expand_dims", "reshape", "ravel", "view",
                   "split", "array_split", "diagonal", "shape", "ndim", "size", "result_type", "can_cast", "atleast_1d",
                   "atleast_2d", "astype", "ascontiguousarray", "broadcast_arrays", "flip", "dtype"))
SYNCS = frozenset(("nonzero", "argwhere", "unique", "flatnonzero", "allclose", "array_equal", "bincount", "compress"))
SEVERAL = {"var": 4, "std": 5, "argsort": 3, "sort": 2, "unique": 6, "nonzero": 3, "mean": 1, "pad": 2, "einsum": 2}


@contextmanager
def counted() -> Iterator[Counts]:
    found = Counts()
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)


def counts() -> list[Counts]:
    """Those that are being made."""
    return _open


def note(name: str = "", launches: int = 1, *, up: int = 0, down: int = 0, sync: str | None = None) -> None:
    for found in _open:
        if name and launches:
            found.launches[name] += launches
        found.up += up
        found.down += down
        if sync is not None:
            found.syncs[sync] += 1
        elif name in SYNCS:
            found.syncs[name] += 1


def copies(array: Any) -> bool:
    """Whether a batched product copies this operand first: CuPy wants it without gaps."""
    return isinstance(array, np.ndarray) and array.ndim > 2 and not array.flags.c_contiguous


def launches_of(name: str, result: Any, given: Any) -> int:
    """How many launches a call of this name was that took `given` and gave `result`."""
    if not _open:
        return 0
    arrays = [x for x in given if isinstance(x, np.ndarray)]
    if name in VIEWS:
        made = [x for x in (result if isinstance(result, list | tuple) else [result]) if isinstance(x, np.ndarray)]
        return sum(not any(x is y or np.may_share_memory(x, y) for y in arrays) for x in made) if arrays else 0
    if isinstance(result, np.ndarray | np.generic) and result.size == 0:
        return 0
    if "matmul" in name:
        return 1 + sum(map(copies, arrays))
    return SEVERAL.get(name, 1)
