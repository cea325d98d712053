"""What slices in few bits and momenta at 1 bit will send, from shapes alone: for `inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.config import Config
from mpitrain.optim import Optimizer
from mpitrain.parallel.compress.blocks import OneBit
from mpitrain.parallel.compress.compressor import Make, Packed, make_compressor
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.parallel.compress.slices import Cut
from mpitrain.placement.place import Placement
from mpitrain.plan.compression import MIB, cost_of, residual_bytes
from mpitrain.schedules.grid import REPLICAS


def packed_lines(config: Config, stages: Sequence[Placement], optimizer: Optimizer, steps: int) -> Iterator[str]:
    """What the first rank of the stage that sends most posts: of gradients, for each micro-batch where these leave one by one,
    and for one gather of all parameters. `optimizer` is of any storage, in a run of `steps`."""
    n, comm, whole = stages[0].grid.count(REPLICAS), config.comm, optimizer.whole_parameters
    if optimizer.sends:
        optimizer.planned(steps, n)                           # type: ignore[attr-defined]
        costs = [cost_of(config, p, Make("signs", OneBit), n, True) for p in stages]
        largest = max(costs, key=lambda cost: cost.dense)
        yield (f"momenta as signs between {n} workers after step {optimizer.frozen_after}: "      # type: ignore[attr-defined]
               f"{largest.sent:,} bytes of a rank and step instead of {largest.dense:,}; {largest.kept / MIB:.2f} MiB of state")
    if n == 1 or stages[0].kind == "none":
        return
    where = "" if comm.compress_force else ", on nodes of their own; on one node it has no effect"
    if comm.compress:
        sent, dense = max(to_owners(p, make_compressor(comm.compress, config.folder), whole) for p in stages)
        kept = max(residual_bytes(config, p) for p in stages)
        yield (f"gradients as {comm.compress} to the owners of slices{where}: {sent:,} bytes of a rank instead of {dense:,}; "
               f"{kept / MIB:.2f} MiB of state")
    if comm.compress_parameters and not comm.node_shared:
        sent, dense = max(to_all(p, make_compressor(comm.compress_parameters, config.folder), whole) for p in stages)
        yield f"parameters as {comm.compress_parameters} to all{where}: {sent:,} bytes of a rank instead of {dense:,}"


def cuts_of(p: Placement, make: Make, whole: bool) -> Iterator[tuple[Cut, list[int]]]:
    """The packed cut of each bucket, and the lengths of its slices."""
    shards = p.shards(p.layout(), whole=whole, blocks=p.kind == "parameters")
    for unit in shards.units:
        compressor = make(pieces_of(unit.segments, unit.start, unit.stop), shards.n, feedback=False)
        assert isinstance(compressor, Packed)
        bounds = unit.owners_to_all.bounds
        yield Cut(compressor, bounds), [stop - start for start, stop in pairwise(bounds)]


def to_owners(p: Placement, make: Make, whole: bool) -> tuple[int, int]:
    """Bytes that the first rank sends to the owners of slices, packed and as float32."""
    found = [(sum(cut.sizes[1:]), 4 * sum(lengths[1:])) for cut, lengths in cuts_of(p, make, whole)]
    return sum(sent + HEADER_BYTES for sent, _ in found), sum(dense + HEADER_BYTES for _, dense in found)


def to_all(p: Placement, make: Make, whole: bool) -> tuple[int, int]:
    """Bytes that the first rank sends of its slices to all others, packed and as float32."""
    n = p.grid.count(REPLICAS) - 1
    found = [(n * cut.sizes[0], 4 * n * lengths[0]) for cut, lengths in cuts_of(p, make, whole)]
    return sum(sent + HEADER_BYTES for sent, _ in found), sum(dense + HEADER_BYTES for _, dense in found)
