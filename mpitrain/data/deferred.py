"""`data.transform` and `data.augment` in forms that a device does: what loaders of runs on a device are given in their place.

    file -> bytes, checked -> DeferredTransforms: a table -> DeferredAugmentation: moves -> StoredRows -> bus -> one kernel

A table has what the transforms themselves make of each number that the dtype has, and moves are drawn by the keys of the host, so
the model is given the bits of the host. The host does, as ever, all transforms where one is not `elementwise`, or where values
are floats or integers of more than 2 bytes; the device moves the floats that come of it. Where an augmentation is neither flip
nor the one crop, or inputs have names, all is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.augment import Augmentation, Checked, Keys, Move, crop
from mpitrain.data.shards import Values
from mpitrain.data.stored import StoredRows
from mpitrain.data.transforms import Transform, Transforms

LARGEST = 1 << 22                        # numbers of a table; more, 16 MB in float32, would not stay in a device's cache
WIDEST = 1 << 16                         # pixels: moves of images have 16 bits


def deferred(transforms: Transforms, augment: Sequence[Augmentation]) -> tuple[Any, list[Any]]:
    """What a loader is given in place of these, for a device."""
    known = [one for one in augment if isinstance(one, Checked) and one.move is not None]
    if transforms.by_input or len(known) < len(augment) or sum(one.function is crop for one in known) > 1:
        return transforms, list(augment)
    by_table = not transforms.by_step and all(map(_is_elementwise, transforms.parts))
    return DeferredTransforms(transforms) if by_table else transforms, [DeferredAugmentation(known)] if known else []


def _is_elementwise(part: Transform) -> bool:
    """Whether the class that has the transform's `__call__` says so: it may be a user's, derived from one that does."""
    owner = next(one for one in type(part).__mro__ if "__call__" in vars(one))
    return bool(vars(owner).get("elementwise", False))


class DeferredTransforms:
    """What becomes of integers of 1 or 2 bytes is put into a table; all else is transformed."""

    def __init__(self, transforms: Transforms):
        self.transforms = transforms
        self._tables: dict[tuple[Any, ...], Values] = {}                      # for good: a device has copies by their identity

    def __call__(self, x: Any) -> Any:
        small = isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype.itemsize <= 2
        if not small or max(x.shape[1:], default=1) > WIDEST:
            return self.transforms(x)
        key, features = (x.dtype.str, x.shape[1:]), (x.shape[1], 1, 1) if x.ndim == 4 else x.shape[1:]
        if prod(features) << 8 * x.dtype.itemsize > LARGEST:
            return self.transforms(x)
        if key not in self._tables:
            self._tables.setdefault(key, self._table(x.dtype, features))      # of several threads, the first one's
        return StoredRows(x, self._tables[key])

    def of_targets(self, y: Values) -> Values:
        return self.transforms.of_targets(y)

    def _table(self, dtype: Any, features: tuple[int, ...]) -> Values:
        """(features, 2^bits): what becomes of each number, in the order of unsigned ones of the same bits."""
        numbers = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
        every = np.broadcast_to(numbers.reshape(-1, *(1 for _ in features)), (len(numbers), *features))
        made = self.transforms(np.ascontiguousarray(every)).reshape(len(numbers), -1)
        return np.ascontiguousarray((made[:, :1] if (made == made[:, :1]).all() else made).T)


class DeferredAugmentation:
    """Draws what all of some augmentations do; floats and stored rows then move on the device, and other rows here."""

    def __init__(self, augment: Sequence[Checked]):
        self.augment = augment

    def __call__(self, x: Any, keys: Keys) -> Any:
        if not isinstance(x, StoredRows) and (x.dtype.kind != "f" or max(x.shape[1:], default=1) > WIDEST):
            for function in self.augment:
                x = function(x, keys)
            return x
        moves = together([one.move(x.shape, keys) for one in self.augment if one.move is not None], len(x))
        return StoredRows(x.values, x.table, moves) if isinstance(x, StoredRows) else StoredRows(x, moves=moves)


def together(moves: Sequence[Move], n: int) -> NDArray[np.int16]:
    """What images (n, ...) do by all moves, of which one shifts at most, one after the other, (n, 2): as `kernels.feed` has it.

    out[j] = x[s j' + right], where j' is j or W - 1 - j. After a mirroring, out[W - 1 - j] changes j' alone; after a shift,
    out[j + a] is x[j' + right + a] or, of a mirrored image, x[j' + right - a].
    """
    down, right, mirrored = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, bool)
    for move in moves:
        if move.down is not None:
            down = down + move.down
        if move.right is not None:
            right = right + np.where(mirrored, -move.right, move.right)
        if move.mirrored is not None:
            mirrored = mirrored ^ move.mirrored
    return np.stack([down, 2 * right + mirrored], axis=1).astype(np.int16)
