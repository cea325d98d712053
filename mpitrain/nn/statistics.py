"""Running statistics: changed by each training forward, or once a step, whatever its micro-batches and ranks.

A training forward gives one set of statistics (not while a block is recomputed: it gave them the first time). By default it
moves the running buffers at once, as in PyTorch. A trainer whose step has several micro-batches, or ranks, defers that: forwards
add up what they find, and once a step the sums, over all ranks, move the buffers to their mean:

    defer_statistics(model)
    ...                                       # the forwards of a step
    flat = collect_statistics(model)          # float64: for each layer its sums, then how many were added
    flat = mesh.sum(flat)
    apply_statistics(model, flat)

A trainer that wants another order of addition collects after each micro-batch and adds the results itself.

On a device the sums of all layers are one array there, as `collect_statistics` has it, and the buffers are parts of another
(`Together`): the kernel of batch norm adds to the one, one launch moves the other, and the host has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from mpitrain.autograd import recomputing
from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.errors import ShapeError
from mpitrain.kernels.batch_norm import move_running
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Buffer

__all__ = ["apply_statistics", "collect_statistics", "defer_statistics", "move_statistics", "running_layers"]


class Running:
    """Exponential averages of per-batch statistics, kept in `buffers`; new = (1 - momentum) old + momentum batch.

    With `steps`, a buffer that counts, the mean of all steps instead: the momentum is 1 / steps.
    """

    def __init__(self, buffers: Sequence[Buffer], momentum: float, steps: Buffer | None = None):
        self.buffers, self.momentum, self.steps = list(buffers), momentum, steps
        self.sums: list[Array] | None = None          # float64, on the device
        self.count = 0
        self.deferred = False                         # True where somebody collects and applies
        self.tally: Array | None = None               # This layer's part of a `Together`, which has sums and count then.

    @cached_property
    def size(self) -> int:
        """The length of this layer's part of the flat array; its buffers must have memory."""
        return sum(b.size for b in self.buffers) + 1

    def record(self, *values: Array) -> None:
        """One micro-batch's statistics, one array per buffer."""
        if recomputing():
            return
        tally = self.tally_here()
        if tally is not None:
            start = 0
            for value in values:
                tally[start:start + value.size] += value.reshape(-1)
                start += value.size
            tally[start:] += 1
            return
        if not self.deferred:
            self._move([value.astype("float64") for value in values])
            return
        if self.sums is None:
            self.sums = [value.astype("float64") for value in values]
        else:
            for total, value in zip(self.sums, values):
                total += value
        self.count += 1

    def tally_here(self) -> Array | None:
        """float64 (size,): where a forward adds its statistics, then 1; None where it gives them to `record`."""
        return self.tally if self.deferred and not recomputing() else None

    def take(self) -> Array:
        """float64 (size,): the sums and the count since the last call."""
        sums, count = self.taken()
        xp = array_module(sums[0])
        return xp.concatenate([*sums, xp.full(1, count, xp.float64)])

    def taken(self) -> tuple[list[Array], float]:
        """(the sums since the last call, flat and float64, one per buffer; how many were added)."""
        xp = array_module(self.buffers[0].array)
        if self.tally is not None:
            *sums, number = xp.split(self.tally.copy(), [*accumulate(b.size for b in self.buffers)])
            self.tally[...] = 0
            return sums, float(number[0])
        sums = [s.reshape(-1) for s in self.sums] if self.sums else [xp.zeros(b.size, xp.float64) for b in self.buffers]
        count, self.sums, self.count = self.count, None, 0
        return sums, count

    def fold(self, sums: Sequence[Array], count: float) -> None:
        """Moves the buffers towards the mean of what was recorded; nothing recorded, nothing changed."""
        if count:
            self._move([(part / count).reshape(buffer.shape) for part, buffer in zip(sums, self.buffers, strict=True)])

    def _move(self, means: Sequence[Array]) -> None:
        """Moves the buffers towards float64 `means`, one per buffer."""
        momentum = self.momentum
        if self.steps is not None:
            self.steps.array += 1
            self.steps.mark_changed()
            momentum = 1.0 / float(self.steps.array)
        for buffer, mean in zip(self.buffers, means, strict=True):
            old = buffer.array
            array_module(old).add((1.0 - momentum) * old, momentum * mean, out=old)
            buffer.mark_changed()


class Together:
    """The running statistics of layers on a device, whose buffers move into one array.

    `sums` is float64 as `collect_statistics` has it: for each layer its sums, then how many were added. `values` has the buffers
    in the same places, and in that of the number the buffer that counts steps, where there is one.
    """

    def __init__(self, layers: Sequence[Running]):
        xp = array_module(layers[0].buffers[0].array)
        starts = [0, *accumulate(layer.size for layer in layers)]
        self.layers = layers
        self.sums = xp.zeros(starts[-1], xp.float64)
        self.values = xp.zeros(starts[-1], layers[0].buffers[0].array.dtype)
        self._momenta = xp.asarray([layer.momentum if layer.steps is None else 0.0 for layer in layers], dtype=xp.float64)
        self._table = xp.asarray([(start, layer.size - 1) for start, layer in zip(starts, layers)], dtype=xp.int64)
        for start, layer in zip(starts, layers):
            layer.tally, place = self.sums[start:start + layer.size], start
            for buffer in (*layer.buffers, *([layer.steps] if layer.steps is not None else [])):
                part = self.values[place:place + buffer.size].reshape(buffer.shape)
                part[...] = buffer.array
                buffer.array, place = part, place + buffer.size
                buffer.mark_changed()

    @staticmethod
    def possible(layers: Sequence[Running]) -> bool:
        """Whether there are layers, all on a device and of one format."""
        arrays = [buffer.array for layer in layers for buffer in layer.buffers]
        return bool(arrays) and array_module(arrays[0]) is not np and len({array.dtype for array in arrays}) == 1

    def move(self) -> None:
        """Moves the buffers towards the mean of what was added up, and begins anew: one launch."""
        move_running(self.values, self.sums, self._momenta, self._table)
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer.mark_changed()


def running_layers(model: Module) -> list[Running]:
    """The layers that keep statistics, in order. Looking for them takes as long as a small model's step: once a run is enough."""
    return [value for _, module in model.named_modules() for value in vars(module).values() if isinstance(value, Running)]


def defer_statistics(model: Module | Sequence[Running], deferred: bool = True) -> None:
    """From now on training forwards only record, for a caller of `collect_statistics` and `apply_statistics`; with False they
    move the running buffers themselves again. `model` may be its `running_layers`."""
    for layer in model if isinstance(model, Sequence) else running_layers(model):
        layer.deferred = deferred


def collect_statistics(model: Module | Sequence[Running]) -> np.ndarray[Any, Any]:
    """float64, on the host: what the layers recorded since the last call; sums over ranks and micro-batches are meaningful.

    `model` may be its `running_layers`.
    """
    layers = model if isinstance(model, Sequence) else running_layers(model)
    flat, taken = np.zeros(sum(layer.size for layer in layers)), [layer.taken() for layer in layers]
    parts = [part for sums, _ in taken for part in sums]
    if not parts:
        return flat
    joined, done, start = asnumpy(array_module(parts[0]).concatenate(parts)), 0, 0     # one copy for all layers
    for layer, (_, count) in zip(layers, taken, strict=True):
        stop = start + layer.size - 1
        flat[start:stop] = joined[done:done + stop - start]
        flat[stop] = count
        done, start = done + stop - start, stop + 1
    return flat


def apply_statistics(model: Module | Sequence[Running], flat: np.ndarray[Any, Any]) -> None:
    """Folds summed statistics into the running buffers, once a step; `model` may be its `running_layers`."""
    layers = model if isinstance(model, Sequence) else running_layers(model)
    expected = sum(layer.size for layer in layers)
    if flat.shape != (expected,):
        raise ShapeError(f"the statistics of this model have shape ({expected},), these {flat.shape}")
    if not layers:
        return
    start, there = 0, array_module(layers[0].buffers[0].array).asarray(flat)           # one copy for all layers
    for layer in layers:
        parts = []
        for buffer in layer.buffers:
            parts.append(there[start:start + buffer.size])
            start += buffer.size
        layer.fold(parts, float(flat[start]))
        start += 1


def move_statistics(layers: Sequence[Running]) -> None:
    """Folds what the layers recorded since the last call into their buffers, where nobody else has recorded anything: `collect`
    and `apply` with nothing between, and without the host."""
    for layer in layers:
        layer.fold(*layer.taken())
