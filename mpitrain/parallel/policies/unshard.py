"""Unsharding: each rank keeps slices of the parameters, and puts those of a block together while that block computes.

    forward     block 0 | block 1 | block 2          backward    block 2 | block 1 | block 0
    gathers   0   1         2                                                1         0

While a block computes, the slices of the next one travel; in backward the next one is that before it. What a block no longer
needs stays until another takes its place, so the last block's forward is followed by its backward without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.autograd import recomputing
from mpitrain.backend import Array
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.work import Work
from mpitrain.nn import Module, Segment, Sequential
from mpitrain.parallel.policies.bucket_memory import BufferPool
from mpitrain.placement.shard_cuts import blocks_of
from mpitrain.placement.shards import Shards, Unit

AWAY = ('with comm.sharding = "parameters" a block\'s parameters are put together for its own forward and backward only; use it '
        "inside that block")


class Group:
    """Neighbouring buckets of one block, which are put together at once."""

    def __init__(self, units: Sequence[Unit]):
        self.units, self.start, self.stop = units, units[0].start, units[-1].stop
        self.segments: list[Segment] = [s for unit in self.units for s in unit.segments]
        self.flat: Array | None = None                        # None while it is sharded.
        self.rounded: Array | None = None                     # The same in 16 bits, where operations read those.
        self.works: list[Work] = []

    def wait(self) -> None:
        """Returns when all slices have arrived."""
        while self.works:
            self.works.pop(0).wait()


class Unsharding:
    """Puts the parameters of a rank's `chunks` together from `shards.values`, and lets them go again, by hooks on the blocks.

    All ranks of `channel` run the same blocks in the same order. `progress` is called by the modules inside a block. With
    `packed`, a `packed.PackedParameters`, slices travel as few bits, and everybody computes with what arrives.
    """

    def __init__(self, chunks: Sequence[Module], shards: Shards, channel: Channel, progress: Callable[[], None],
                 packed: Any = None):
        self.shards, self.channel, self.progress, self.packed = shards, channel, progress, packed
        self.pool = BufferPool(shards.layout)
        self.groups: list[Group] = []
        self._needs: list[list[Group]] = []                   # The groups of each block.
        owner = {s.name: unit for unit in shards.units for s in unit.segments}
        group_of: dict[int, Group] = {}                       # The key is the unit.
        for chunk in chunks:
            blocks = list({id(block): block for block in blocks_of(chunk)}.values())     # A block used twice counts as the first.
            for i, block in enumerate(blocks):
                units = {id(u): u for u in (owner[p.name] for p in block.parameters())}
                new = [unit for key, unit in units.items() if key not in group_of]
                for group in grouped(new):
                    self.groups.append(group)
                    group_of |= {id(unit): group for unit in group.units}
                number = len(self._needs)
                needed = {group_of[key] for key in units}
                self._needs.append([group for group in self.groups if group in needed])
                self._watch(block, number, number - 1 if i else None, number + 1 if i < len(blocks) - 1 else None)
            if isinstance(chunk, Sequential):
                chunk.between = progress
        for group in self.groups:
            self._detach(group)

    def reshard(self) -> None:
        """Drops the parameters that were put together, since the slices have changed or are about to."""
        for group in self.groups:
            self._reshard(group)

    def _watch(self, block: Module, number: int, before: int | None, after: int | None) -> None:
        """Adds the hooks of block `number`, whose neighbours in its chunk are `before` and `after`."""
        def forward(module: Module, inputs: Any) -> None:
            self._unshard(number, before if recomputing() else after)

        def backward(module: Module) -> None:
            self._unshard(number, before)

        def inside(module: Module, inputs: Any) -> None:
            self.progress()
        block.before_forward(forward)
        block.before_backward(backward)
        for _, module in block.named_modules():
            if module is not block:
                module.before_forward(inside)

    def _unshard(self, number: int, following: int | None) -> None:
        """The parameters of a block are there when this returns, and those of the next block on their way."""
        needed, ahead = self._needs[number], [] if following is None else self._needs[following]
        for group in self.groups:
            if group.flat is not None and group not in needed and group not in ahead:
                self._reshard(group)
        for group in (*needed, *ahead):
            self._start_gather(group)
        for group in needed:
            self._attach(group)

    def _start_gather(self, group: Group) -> None:
        if group.flat is not None:
            return
        flat = group.flat = self.pool.take(group.stop - group.start)
        for unit in group.units:
            part = flat[unit.start - group.start:unit.stop - group.start]
            if self.packed is not None:
                group.works.append(self.packed.start_into(unit, part))
                continue
            part[unit.within] = self.shards.values[unit.shard]
            if self.channel.size > 1:
                group.works.append(self.channel.start_all_gather(part, unit.owners_to_all, unit.name))

    def _attach(self, group: Group) -> None:
        group.wait()
        assert group.flat is not None
        if group.rounded is None and self.shards.layout.is_mixed:
            group.rounded = group.flat.astype(self.shards.layout.compute_dtype)
        for s in group.segments:
            if not s.parameter.allocated:
                s.parameter.bind(*[None if flat is None else flat[s.start - group.start:s.stop - group.start].reshape(s.shape)
                                   for flat in (group.flat, group.rounded)])

    def _reshard(self, group: Group) -> None:
        if group.flat is not None:
            group.wait()
            group.flat = group.rounded = None
            self._detach(group)

    def _detach(self, group: Group) -> None:
        for s in group.segments:
            s.parameter.away = AWAY
            if s.parameter.allocated:
                del s.parameter.array
                s.parameter.unrounded = None


def grouped(units: Sequence[Unit]) -> list[Group]:
    """Units as groups of neighbours."""
    runs: list[list[Unit]] = []
    for unit in sorted(units, key=lambda unit: unit.start):
        if runs and unit.start == runs[-1][-1].stop:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return [Group(run) for run in runs]
