"""Rows of embeddings with `max_norm`: those that any rank has looked up in a step are scaled on all ranks, before the update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.backend import Array, asnumpy
from mpitrain.comm.face import AnyChannel
from mpitrain.nn import Embedding, Module


class ScaledRows:
    """The embeddings with `max_norm` of a stage's `chunks`; `channel` has the ranks that look up rows of the same tables."""

    def __init__(self, chunks: Sequence[Module], channel: AnyChannel):
        self.channel = channel
        self.tables = {id(module): module for chunk in chunks for _, module in chunk.named_modules()
                       if isinstance(module, Embedding) and module.max_norm is not None}
        self.seen: list[Array] = []
        for table in self.tables.values():
            self.seen.append(table.weight.xp.zeros(table.weight.shape[0], bool))
            table.used = partial(_mark, self.seen[-1])

    def apply(self) -> None:
        """Scales the rows of the step. It communicates where there are such tables."""
        if not self.tables:
            return
        counts = np.concatenate([asnumpy(seen) for seen in self.seen]).astype(np.float64)
        self.channel.allreduce(counts, name="rows that were looked up")
        first = 0
        for table, seen in zip(self.tables.values(), self.seen):
            here = counts[first:first + len(seen)]
            first += len(seen)
            table.scale_rows(table.weight.xp.asarray(np.flatnonzero(here)))
            seen[:] = False


def _mark(seen: Array, indices: Any) -> None:
    seen[indices.reshape(-1)] = True
