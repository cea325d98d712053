"""Bags of embeddings: sums, means or maxima of rows of a table. Letters: `B` bags, `L` indices of each, `D` width."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import asnumpy
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.basic import Embedding
from mpitrain.nn.init import Initialiser

__all__ = ["EmbeddingBag"]


class EmbeddingBag(Embedding):
    """Integers (B, L), or (T,) with the `offsets` (B,) where bags begin, to (B, D): the sum, mean or maximum of their rows.

    Indices equal to `padding_idx` are left out, also of the count of a mean. Empty bags give zeros. Of equal maxima each gets its
    share of the gradient.
    """

    by_position = False

    def __init__(self, count: int, width: int, mode: str = "mean", *, padding_idx: int | None = None,
                 max_norm: float | None = None, norm_type: float = 2.0, include_last_offset: bool = False,
                 weight_init: Initialiser | None = None):
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f'EmbeddingBag: mode is "{mode}", expected "sum", "mean" or "max"')
        super().__init__(count, width, padding_idx=padding_idx, max_norm=max_norm, norm_type=norm_type, weight_init=weight_init)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, indices: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """`per_sample_weights`, of the indices' shape, multiply the rows of a sum."""
        shape = tuple(indices.shape)
        if per_sample_weights is not None and (self.mode != "sum" or tuple(per_sample_weights.shape) != shape):
            raise ShapeError(f"EmbeddingBag: per_sample_weights of shape {tuple(per_sample_weights.shape)} and mode "
                             f'"{self.mode}", expected shape {shape} and mode "sum"')
        plain = indices.array if isinstance(indices, Tensor) else indices
        counted = None
        if len(shape) == 1 and offsets is not None:
            places, counted = self._places(offsets, shape[0])
            plain = plain[places]
            if per_sample_weights is not None:
                per_sample_weights = ops.getitem(per_sample_weights, places)
        elif len(shape) != 2 or offsets is not None:
            raise ShapeError(f"EmbeddingBag: indices of shape {shape} {'with' if offsets is not None else 'without'} offsets; "
                             "expected (bags, indices of each), or (indices,) with offsets")
        rows = super().forward(plain)
        if per_sample_weights is not None:
            rows = rows * ops.expand_dims(per_sample_weights, -1)
        if self.padding_idx is not None:
            kept = plain != self.padding_idx
            counted = kept if counted is None else counted & kept
        return self._of_rows(rows, counted)

    def _places(self, offsets: Any, count: int) -> tuple[Any, Any]:
        """Where the indices of each bag are (B, L), L that of the largest, and which of these places are in the bag."""
        begins = np.array(self._bags(offsets, count), "int64")
        ends = np.append(begins[1:], count)[:len(begins)]
        places = begins[:, None] + np.arange(int((ends - begins).max(initial=0)))
        xp = self.weight.xp
        return xp.asarray(np.minimum(places, max(count - 1, 0))), xp.asarray(places < ends[:, None])

    def _bags(self, offsets: Any, count: int) -> list[int]:
        begins = asnumpy(offsets.array if isinstance(offsets, Tensor) else offsets)
        good = begins.ndim == 1 and begins.dtype.kind in "iu" and (not begins.size or int(begins[0]) == 0)
        if good and begins.size:
            good = bool((np.diff(begins.astype("int64")) >= 0).all()) and int(begins[-1]) <= count
        if not good or (self.include_last_offset and (not begins.size or int(begins[-1]) != count)):
            more = ", and end with the number of indices" if self.include_last_offset else ""
            raise ShapeError(f"EmbeddingBag: offsets of shape {begins.shape}, {begins.dtype}, for {count} indices; expected "
                             f"integers that begin with 0 and do not fall{more}")
        return [int(n) for n in (begins[:-1] if self.include_last_offset else begins)]

    def _of_rows(self, rows: Tensor, counted: Any) -> Tensor:
        """(B, D) of (B, L, D), of those rows alone that are `counted` (B, L)."""
        batch, length, width = rows.shape
        if length == 0:
            return ops.reshape(ops.sum(rows, dim=1), batch, width)
        xp = rows.xp
        if self.mode == "max":
            if counted is None:
                return ops.max(rows, dim=1)
            lowest = xp.asarray(-np.inf, rows.dtype)
            found = ops.max(ops.where(counted[..., None], rows, lowest), dim=1)
            return ops.where(counted.any(axis=1)[:, None], found, 0.0)
        if counted is not None:
            rows = ops.where(counted[..., None], rows, 0.0)
        total = ops.sum(rows, dim=1)
        if self.mode == "sum":
            return total
        count = xp.full((batch, 1), length) if counted is None else xp.maximum(counted.sum(axis=1), 1)[:, None]
        return total / count.astype(rows.dtype)
