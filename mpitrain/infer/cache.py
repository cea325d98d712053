"""The keys and values of the positions that a model has seen, so that a further token costs one position, not the whole text.

On a GPU the keys and values lie there, and so do the numbers of a step's slots and positions, which come up together with its
tokens.

Letters: `B` rows of a batch, `L` new positions of each, `H` heads, `D` width of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import CPU, Array, Device, array_module
from mpitrain.errors import ConfigError
from mpitrain.kernels.cached_attention import cached_attention, scale_of
from mpitrain.kernels.flash_attention import flash_attention
from mpitrain.nn import Module, MultiHeadAttention
from mpitrain.nn.across import Across


class Cache:
    """Keys and values of all attention layers of `model` for `slots` texts of at most `capacity` tokens.

    A forward is for the rows `use` names: their slots, and where in each text the new positions begin. ConfigError where the
    model has a layer that looks at positions in a way of its own. Memory is that of all positions from the start, of the `dtype`
    that the layers compute in.
    """

    def __init__(self, model: Module, slots: int, capacity: int, dtype: Any, device: Device = CPU):
        self.slots, self.capacity, self.device = slots, capacity, device
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.layers: list[CachedAttention] = []
        for path, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                if not ((module.plain or module.grouped) and module.causal):
                    raise ConfigError(f'"{path}" is no plain causal attention, and its keys cannot be kept; generate with '
                                      "--no-cache")
                self.layers.append(CachedAttention(self, module, dtype))
                module.across = self.layers[-1]
            if module.by_position:        # attention turns by angles that the host computes; others look rows of a table up
                module.spread = self.places if isinstance(module, MultiHeadAttention) else self.rows_of_places

    def use(self, slots: list[int], starts: list[int]) -> None:
        self.rows, self.starts = slots, starts
        self.slots_there, self.at = np.array(slots, np.int64), np.array(starts, np.int64)

    def bring(self, tokens: Array) -> Array:
        """The tokens (B, L) int64 beside the model, and with them what `use` was told, in one copy."""
        if self.device.xp is np:
            return tokens
        n = len(self.rows)
        there: Array = self.device.xp.asarray(np.concatenate([self.slots_there, self.at, tokens.reshape(-1)]))
        self.slots_there, self.at = there[:n], there[n:2 * n]
        return there[2 * n:].reshape(tokens.shape)

    def places(self, length: int) -> Any:
        """The positions (B, L) in their texts of the tokens of a forward, on the host."""
        return np.array(self.starts)[:, None] + np.arange(length)

    def rows_of_places(self, length: int) -> Any:
        """The same beside the model."""
        at = self.at[:, None]
        return at if length == 1 else at + self.device.xp.arange(length)


class CachedAttention(Across):
    """Stands in for `ops.self_attention` of one layer, for the heads that are here."""

    def __init__(self, cache: Cache, module: MultiHeadAttention, dtype: Any):
        self.cache = cache
        if module.joint:
            heads = module.qkv.weight.shape[0] // (3 * module.head_width)  # those that are here
        else:
            heads = module.key.weight.global_shape[0] // module.head_width
        shape = (cache.slots, heads, cache.capacity, module.head_width)
        self.keys, self.values = (cache.device.xp.zeros(shape, dtype) for _ in range(2))
        self.scale = scale_of(module.head_width)

    def attend(self, qkv: Tensor, heads: int, **_: Any) -> Tensor:
        """The positions of each row see those before them in its slot, and themselves. qkv (B, L, 3 H D).

        A query's sums go key by key in blocks from the text's beginning, so they are those of the whole text at once.
        """
        batch, length, width = qkv.shape
        whole = qkv.array
        if length == 1 and self.cache.device.xp is not np:
            return Tensor(self._next(whole[:, 0], 0)[:, None])
        out = array_module(whole).empty((batch, length, width // 3), qkv.dtype)
        if length > 1 and not any(self.cache.starts):
            q, k, v = whole.reshape(batch, length, 3, heads, width // (3 * heads)).transpose(2, 0, 3, 1, 4)
            self._keep(k, v)
            flash_attention(q, k, v, out.reshape(batch, length, heads, -1).swapaxes(1, 2), self.scale, True, None)
            return Tensor(out)
        for i in range(length):
            out[:, i] = self._next(whole[:, i], i)
        return Tensor(out)

    def attend_groups(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same (B, L, H D) for queries (B, H, L, D), G neighbouring heads of which share keys and values (B, H / G, L, D).

        Keys are kept once: the heads are taken in G sets, in which each has keys of its own.
        """
        q, k, v = queries.array, keys.array, values.array
        batch, heads, length, width = q.shape
        each, xp = heads // k.shape[1], array_module(q)
        whole = length > 1 and not any(self.cache.starts)
        if xp is not np and not whole:                   # its kernel takes all heads that share keys at once
            made = [self._next(xp.concatenate([part[:, :, i].reshape(batch, -1) for part in (q, k, v)], axis=1), i)
                    for i in range(length)]
            return Tensor(xp.stack(made, axis=1))
        if whole:
            self._keep(k, v)
        out = xp.empty((batch, length, heads, width), q.dtype)
        for own in range(each):
            mine = q[:, own::each]
            if whole:
                flash_attention(mine, k, v, out[:, :, own::each].swapaxes(1, 2), self.scale, True, None)
                continue
            for i in range(length):
                row = np.stack([mine[:, :, i], k[:, :, i], v[:, :, i]], axis=1).reshape(batch, -1)
                out[:, i, own::each] = self._next(row, i).reshape(batch, -1, width)
        return Tensor(out.reshape(batch, length, heads * width))

    def _keep(self, keys: Array, values: Array) -> None:
        """Those (B, H, L, D) of texts from their beginning."""
        for slot, key, value in zip(self.cache.rows, keys, values):
            self.keys[slot, :, :key.shape[1]], self.values[slot, :, :key.shape[1]] = key, value

    def _next(self, row: Array, i: int) -> Array:
        """What position i of the new ones gives, whose queries, keys and values are `row` (B, 3 H D)."""
        at = self.cache.at + i if i else self.cache.at
        given = row.astype(self.keys.dtype, copy=False)           # behind a table of few bits numbers are float32
        made: Array = cached_attention(given, self.keys, self.values, self.cache.slots_there, at)
        return made.astype(row.dtype, copy=False)
