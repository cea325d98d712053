"""Rows on their way to a device that makes of them what a model is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredRows:
    """Rows (N, ...) as they are stored, or moved by nothing yet, with what is to become of them (`kernels.feed`).

    `table` (C or 1, 2^bits), on the host, has what becomes of each number in `values`, of 1 or 2 bytes; None: they stay. `moves`
    (N, 2) int16 say how images move; None: they stay. As far as rows go it is used as an array is.
    """

    values: Any
    table: np.ndarray[Any, Any] | None = None
    moves: Any = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> StoredRows:
        return replace(self, values=self.values[rows], moves=None if self.moves is None else self.moves[rows])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Of what goes up with each batch."""
        return int(self.values.nbytes) + (0 if self.moves is None else int(self.moves.nbytes))

    def through(self, send: Callable[[Any, str], Any]) -> StoredRows:
        """With `send(array, its name)` of what goes up with each batch."""
        moves = None if self.moves is None else send(self.moves, "moves")
        return replace(self, values=send(self.values, "values"), moves=moves)
