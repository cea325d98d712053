"""An optimizer's update of all runs by one launch, where parameters live on a device.

    runs      [0, 5000) decayed | [5008, 5108) not | ...             parameters alike are one run
    tiles     0..2047  2048..4095  4096..4999  5008..5107  ...      a table on the device, made once: a block of threads each
    scalars   rates and corrections of this step, a row a decay      memory of the device that one small copy fills before

A launch that reads what differs from step to step from memory can be captured and launched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy, constant, overwrite
from mpitrain.backend.runtime import runtime
from mpitrain.kernels.device.code import FORMATS, computed, contiguous
from mpitrain.kernels.device.optimizer import RULES, step_scalars, tiles_of
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.optimizer import FACTOR, FOUND, LEFT_OUT
from mpitrain.optim.places import memory_of, place_in

MOST_TABLES = 256            # lists of runs whose tables are kept: as many as there are buckets, or parts with gradients


class Run(Protocol):
    """Elements [start, stop) that are updated alike: an `optimizer.Run`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def decay(self) -> float: ...


class Updater(Protocol):
    """What is asked of an optimizer here."""

    storage: Any
    state: dict[str, Array]
    kernel: Kernel | None
    condensed: bool
    launch: Any
    by_step: Sequence[tuple[int, int, float]]

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]: ...
    def change(self, run: Any, gradients: Array, lr: float, step: int, scale: float) -> None: ...


class Table(NamedTuple):
    """Where the runs of one list lie, on the device, and the scalars of each row, which each step writes."""

    decays: tuple[float, ...]
    tiles: Array
    scalars: Array


class OneLaunch:
    """The update of an optimizer that has a kernel. Values and gradients may be parts of other arrays (`places.memory_of`)."""

    def __init__(self, optimizer: Updater):
        self.optimizer = optimizer
        assert optimizer.kernel is not None
        self.rule = RULES[optimizer.kernel.name]
        self._tables: dict[tuple[bool, tuple[Run, ...]], Table] = {}

    def __call__(self, runs: Sequence[Run], gradients: Any, lr: float, step: int, scale: float, numbers: Array | None) -> None:
        """Changes the elements of `runs`, which depend on no other; `numbers` as in `kernels.optimizer.conclude_norm`."""
        table = self.fill(runs, gradients, lr, step, scale, numbers)
        storage, state = self.optimizer.storage, tuple(self.optimizer.state.values())
        self.rule(memory_of(storage.values), contiguous(memory_of(gradients)), state, table.scalars, table.tiles,
                  copy_of(storage), numbers)

    def fill(self, runs: Sequence[Run], gradients: Any, lr: float, step: int, scale: float, numbers: Array | None) -> Table:
        """The table of the runs, with the scalars of a step: all that a launch of it needs of the host. Steps that `numbers`
        counts as left out are taken off `step` on the device, which alone knows them."""
        key = hasattr(gradients, "place"), tuple(runs)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            table = self._tables[key] = self._made(key[1], gradients)
        rows = [self.optimizer.scalars(decay, lr, step, scale) for decay in table.decays]
        if rows and self.optimizer.by_step and numbers is not None:
            kinds = constant(array_module(numbers), np.array(self.optimizer.by_step, np.float64))
            step_scalars(table.scalars, np.array(rows), step, lr, kinds, numbers)
        elif rows:
            overwrite(table.scalars, np.array(rows, table.scalars.dtype))
        return table

    def _made(self, runs: tuple[Run, ...], gradients: Any) -> Table:
        decays, values = tuple(dict.fromkeys(run.decay for run in runs)), self.optimizer.storage.values
        memory = memory_of(values)
        xp = array_module(memory)
        rows = [(place_in(values, run.start), place_in(gradients, run.start), run.start, run.stop - run.start,
                 decays.index(run.decay)) for run in runs]
        return Table(decays, xp.asarray(tiles_of(rows)), xp.empty((len(decays), self.rule.scalars), computed(memory.dtype)))


def change(optimizer: Updater, runs: Sequence[Run], gradients: Any, lr: float, step: int, scale: float,
           numbers: Array | None) -> None:
    """The update of `runs` by one launch. Where the rule is more than a kernel, or there is no device, they are updated one after
    the other, and the host waits for `numbers`."""
    if optimizer.launch is False:
        optimizer.launch = one_launch(optimizer)
    if optimizer.launch is not None:
        optimizer.launch(runs, gradients, lr, step, scale, numbers)
        return
    if numbers is not None:
        found = asnumpy(numbers)
        if found[FOUND]:
            return
        scale, step = scale * float(found[FACTOR]), max(1, step - int(found[LEFT_OUT]))
    for run in runs:
        optimizer.change(run, gradients[run.start:run.stop], lr, step, scale)
    values, copy = optimizer.storage.values, copy_of(optimizer.storage)
    if copy is not None:
        for run in runs:
            place = place_in(values, run.start)
            copy[place:place + run.stop - run.start] = values[run.start:run.stop].astype(copy.dtype)


def copy_of(storage: Any) -> Array | None:
    """The copy of a storage's values in 16 bits, in their layout, that is computed with; None where values are."""
    found: Array | None = getattr(getattr(storage, "whole", storage), "compute", None)
    return found


def one_launch(optimizer: Updater) -> OneLaunch | None:
    """The update by one launch; None where it has no kernel for that, and on a device that runs no kernels."""
    values, kernel = memory_of(optimizer.storage.values), optimizer.kernel
    usable = kernel is not None and kernel.name in RULES and not optimizer.condensed
    if not usable or values.dtype.name not in FORMATS or runtime(array_module(values).__name__) is None:
        return None
    return OneLaunch(optimizer)
