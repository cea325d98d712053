"""Updates of optimizers and norms of gradients on a device; see kernels/optimizer.py.

The versions of the kernels update one run. An optimizer updates all its runs by one launch: `RULES[name]` with a table of tiles,
which `tiles_of` makes of the runs, and memory of the device for what differs from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, computed, contiguous
from mpitrain.kernels.optimizer import NORM_BLOCK

SOURCE, WIDE, TILE = Source("optimizer"), 256, 2048                   # optimizer.cu's WIDE and TILE
COPIES = ("bfloat16", "float16")
_conclude = SOURCE.function("conclude_norm", "D!:6 D:n in i d d d")
_square_sums = SOURCE.function("square_sums", "X L?:2b D!:b in ib")
_step_scalars = SOURCE.function("step_scalars", "X!:rc X:rc D:2 D:3k D:6 ir ic ik in")


class Rule:
    """The launch of one rule of so many states and scalars."""

    def __init__(self, name: str, states: int, scalars: int):
        self.name, self.states, self.scalars = name, states, scalars
        self._run: DeviceFunction = SOURCE.function(
            name, "X!:n X:e X?!:m X?!:m X?!:m S:rc L?:5t H?!:n D?:5 in ie im it ir ic i")

    def __call__(self, values: Array, gradients: Array, state: tuple[Array, ...], scalars: Array, tiles: Array | None = None,
                 copy: Array | None = None, numbers: Array | None = None) -> None:
        """Updates the tiles (default: all n elements, by the first row of `scalars`); arrays are flat.

        `scalars` (rows, scalars of the kernel) are of the format that the values are computed in. `copy`, as long as the values
        and of 16 bits, gets the new values; `numbers` are those of `conclude_norm`: their factor multiplies the gradients, and
        where they say that a gradient was not finite nothing changes.
        """
        if len(state) != self.states or scalars.shape[1:] != (self.scalars,):
            raise ShapeError(f"{self.name} has {self.states} states and {self.scalars} scalars, got {len(state)} and "
                             f"{scalars.shape[1:]}")
        if copy is not None and copy.dtype.name not in COPIES:
            raise ShapeError(f"a copy in 16 bits is bfloat16 or float16, not {copy.dtype.name}")
        n, kept = values.size, min((part.size for part in state), default=0)
        if tiles is None and (gradients.size < n or state and kept < n):
            raise ShapeError(f"{self.name}: {n} values have {gradients.size} gradients and a state of {kept}")
        blocks = -(-n // TILE) if tiles is None else len(tiles)
        if blocks:
            half = int(copy is not None and copy.dtype.name == "float16")
            self._run((blocks,), WIDE, values, gradients, *(*state, None, None, None)[:3], scalars, tiles, copy, numbers, n,
                      gradients.size, kept, 0 if tiles is None else blocks, *scalars.shape, half)


RULES: dict[str, Rule] = {}


def _rule(name: str, states: int, scalars: int) -> None:
    rule = RULES[name] = Rule(name, states, scalars)

    @device(name)
    def update(values: Array, gradients: Array, *others: Any) -> None:
        state, numbers = others[:states], others[states:]
        rows = array_module(values).asarray(np.array([numbers], computed(values.dtype)))
        rule(values, contiguous(gradients), state, rows)


for _name, _states, _scalars in (("sgd", 0, 3), ("sgd_momentum", 1, 6), ("sgd_dampened", 1, 7), ("adam", 2, 9), ("amsgrad", 3, 9),
                                 ("lamb", 3, 8), ("rmsprop", 2, 7), ("rmsprop_centered", 3, 7)):
    _rule(_name, _states, _scalars)


def step_scalars(to: Array, rows: np.ndarray[Any, Any], step: int, lr: float, kinds: Array, numbers: Array) -> None:
    """Writes an update's scalars, (rows, scalars), to `to` on a device: `rows`, of the host, but those of `kinds` for `step` less
    the steps that `numbers` counts as left out. `kinds` (k, 3) are float64 rows (column, kind, beta), on the device."""
    xp, now = array_module(to), np.array([step, lr])
    brought = xp.asarray(np.concatenate([now.view(np.uint8), rows.astype(to.dtype).reshape(-1).view(np.uint8)]))
    _step_scalars((1,), WIDE, to, brought[now.nbytes:].view(to.dtype), brought[:now.nbytes].view(np.float64), kinds, numbers,
                  *to.shape, len(kinds), numbers.size)


def tiles_of(runs: Iterable[tuple[int, int, int, int, int]]) -> np.ndarray[Any, Any]:
    """int64 (tiles, 5): the table of runs (start in the values, in the gradients, in the state; length; row of scalars), cut into
    tiles."""
    parts = []
    for *starts, length, row in runs:
        first = np.arange(0, length, TILE, dtype=np.int64)
        parts.append(np.stack([*(first + start for start in starts), np.minimum(TILE, length - first), np.full_like(first, row)],
                              axis=1))
    return np.concatenate(parts) if parts else np.zeros((0, 5), np.int64)


def blocks_of(extents: Iterable[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """int64 (blocks, 2): start and length of each block of elements [start, stop) whose squares are added first."""
    parts = []
    for start, stop in extents:
        first = np.arange(start, stop, NORM_BLOCK, dtype=np.int64)
        parts.append(np.stack([first, np.minimum(NORM_BLOCK, stop - first)], axis=1))
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)


def sums_of_blocks(flat: Array, blocks: Array) -> Array:
    """float64 (blocks,): the sums of squares of the blocks in a table of `blocks_of`, which is on the device."""
    out = array_module(flat).empty(len(blocks), np.float64)
    if len(blocks):
        _square_sums((len(blocks),), WIDE, flat, blocks, out, flat.size, len(blocks))
    return out


@device("square_sums")
def square_sums(x: Array) -> Array:
    x = contiguous(x)
    blocks = -(-x.size // NORM_BLOCK)
    out = array_module(x).empty(blocks, np.float64)
    if blocks:
        _square_sums((blocks,), WIDE, x, None, out, x.size, blocks)
    return out


@device("conclude_norm")
def conclude_norm(numbers: Array, sums: Array, limit: float, interval: int, growth: float, backoff: float) -> None:
    _conclude((1,), WIDE, numbers, sums, sums.size, interval, limit, growth, backoff)

