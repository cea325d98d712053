"""Parameters of which owners keep float32 and everybody computes with what fits into few bits: how their slices travel."""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel, Objects
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.comm.work import Work
from mpitrain.config import Config
from mpitrain.parallel.compress.choose import prove_own, several_nodes
from mpitrain.parallel.compress.compressor import Packed, make_compressor
from mpitrain.parallel.compress.exchange import Clock
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.parallel.compress.slices import PackedGather
from mpitrain.parallel.policies.node_copy import NodeCopy
from mpitrain.placement.shards import Shards, Unit


class PackedParameters:
    """The gathers of a policy with slices, over `channel`: all ranks with the same part of the model, or with a `copy` on each
    node the same-numbered ones of all nodes, who bring in that rank's piece. CompressError, on all ranks of `control`, for a
    compressor of the user's own that is wrong at the sizes of this model. It communicates."""

    def __init__(self, config: Config, channel: Channel, shards: Shards, control: Objects, copy: NodeCopy | None = None):
        self.channel, self.shards, self.copy = channel, shards, copy
        self.text, self.clock = config.comm.compress_parameters, Clock()
        make = make_compressor(self.text, config.folder)
        layout = shards.layout
        prove_own(make, channel.size, pieces_of(layout.segments, 0, layout.size), control, seed=config.run.seed, feedback=False,
                  first=channel.rank == 0)
        self.sent_bytes = self.dense_bytes = 0                # posted since the start, and what that would be as float32
        self._gathers: dict[int, PackedGather] = {}           # by the start of the unit
        for unit in shards.units:
            start, stop = self._ends(unit)
            bounds = unit.owners_to_all.bounds if copy is None else [b - copy.bounds(unit)[0] for b in copy.bounds(unit)]
            compressor = make(pieces_of(unit.segments, start, stop), channel.size, feedback=False)
            assert isinstance(compressor, Packed)
            self._gathers[unit.start] = PackedGather(channel, compressor, bounds, unit.name, self.clock)

    def _ends(self, unit: Unit) -> tuple[int, int]:
        """The elements of the layout that travel, of those of a unit."""
        if self.copy is None:
            return unit.start, unit.stop
        low, high = self.copy.piece(unit)
        return unit.start + low, unit.start + high

    def start(self, unit: Unit, whole: Array) -> Work:
        """Begins to write the values of all owners of a unit into its part of `whole`, which begins where the layout does."""
        start, stop = self._ends(unit)
        return self.start_into(unit, whole[start:stop])

    def start_into(self, unit: Unit, part: Array) -> Work:
        """The same into memory for what travels of this unit alone."""
        self.sent_bytes += self._gathers[unit.start].sent
        self.dense_bytes += self._dense(unit)
        return self._gathers[unit.start].start(self.shards.values[unit.shard], part)

    def round(self, whole: Array) -> None:
        """What all would get of these values, which this rank has all of. It does not communicate."""
        for unit in self.shards.units:
            start, stop = self._ends(unit)
            self._gathers[unit.start].round(whole[start:stop])

    @property
    def sent(self) -> int:
        """Bytes that this rank posts for one gather of everything."""
        return sum(gather.sent for gather in self._gathers.values())

    @property
    def sent_dense(self) -> int:
        """The same of float32."""
        return sum(map(self._dense, self.shards.units))

    def _dense(self, unit: Unit) -> int:
        found: int = HEADER_BYTES + (self.channel.size - 1) * self.shards.dtype.itemsize * (unit.own.stop - unit.own.start)
        return found

    def note(self) -> str:
        """What travels, for the run to say."""
        between = f"between {self.channel.size} {'nodes' if self.copy is not None else 'ranks'}"
        return (f"parameters travel as {self.text} {between}, and everybody computes with what arrives: {self.sent:,} bytes of a "
                f"rank for each gather of all instead of {self.sent_dense:,}; owners keep float32")


def why_not(config: Config, channel: AnyChannel, copy: NodeCopy | None) -> str:
    """The reason why parameters travel as they are; empty text where they are packed. It communicates."""
    what = f'comm.compress_parameters = "{config.comm.compress_parameters}" has no effect'
    if copy is not None and copy.shared.cross is None:
        return f"{what}: all {channel.size} ranks are on one node, whose one copy of the parameters they write"
    if copy is None and not config.comm.compress_force and not several_nodes(channel):
        return (f"{what}: all {channel.size} ranks are on one node, where messages take less time than encoding; "
                "comm.compress_force = true uses it all the same")
    return ""
