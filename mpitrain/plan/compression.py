"""What compressed gradients will send and keep, from shapes alone: for `inspect`, and for the forecast of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpitrain.comm.messages.prepare import make_plan
from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.config import Config
from mpitrain.parallel.compress.check import check_compressor
from mpitrain.parallel.compress.compressor import STAGES, Compressor, Make, make_compressor
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.parallel.compress.programs import program_of
from mpitrain.placement.place import Placement
from mpitrain.schedules.collectives import choose
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.steps import Algorithm

MIB = 2**20


class Cost(NamedTuple):
    """Bytes of the first rank of a stage: sent in a step, sent if it were dense, kept from step to step."""

    sent: int
    dense: int
    kept: int


def cost_of(config: Config, p: Placement, make: Make, n: int, feedback: bool) -> Cost:
    """The cost of a stage's exchange between `n` workers, each of which has whole buckets."""
    layout, sent, dense, kept = p.layout(), 0, 0, 0
    for bucket in p.buckets(layout):
        if not bucket.trained_ever:
            continue
        pieces = pieces_of(bucket.segments, bucket.start, bucket.stop)
        compressor = make(pieces, n, seed=config.run.seed, feedback=feedback)
        plan = make_plan(_steps(config, n, compressor.length), 0, n, bucket.stop - bucket.start, 4)
        dense += HEADER_BYTES + sum(stop - start for round_ in plan.rounds for _, start, stop, _ in round_.sends)
        sent += HEADER_BYTES + program_of(compressor, 0, lambda words: _steps(config, n, words), {}, lambda: 0).sent
        kept += kept_by(compressor)
    return Cost(sent, dense, kept)


def kept_by(compressor: Compressor) -> int:
    """Bytes of the state of one worker; of what owners keep, its share."""
    sizes = {"worker": 0, "owner": 0, "all": 0}
    for kept in compressor.states().values():
        count = 4
        for length in kept.shape:
            count *= length
        sizes[kept.of] += count
    return sizes["worker"] + sizes["owner"] // compressor.n + sizes["all"]


def residual_bytes(config: Config, p: Placement, share: float = 1.0, text: str = "") -> int:
    """Bytes that a rank keeps for compressed gradients, if it has that `share` of a worker's; by default all of it. `text` names
    the compressor of an optimizer that has one (default: comm.compress)."""
    n, feedback = p.grid.count(REPLICAS), bool(text) or config.comm.compress_feedback
    if not (text or (config.comm.compress and n > 1)) or not share or p.kind in ("gradients", "parameters"):
        return 0
    found = cost_of(config, p, make_compressor(text or config.comm.compress, config.folder), n, feedback)
    if p.kind == "optimizer":                                 # No sum is rounded: there is what a worker's messages leave out.
        return 4 * p.layout().size * feedback
    return int(share * found.kept)


def prove(config: Config, stages: Sequence[Placement]) -> None:
    """CompressError where a compressor of the user's own is not one, at the sizes of this model."""
    n, comm = stages[0].grid.count(REPLICAS), config.comm
    for text, feedback in ((comm.compress, comm.compress_feedback), (comm.compress_parameters, False)):
        make = make_compressor(text, config.folder) if text else None
        if make is None or not make.own or n == 1:
            continue
        for p in stages:
            layout = p.layout()
            check_compressor(make, n, pieces_of(layout.segments, 0, layout.size), seed=config.run.seed, feedback=feedback)


def compression_lines(config: Config, stages: Sequence[Placement]) -> Iterator[str]:
    """What travels between workers, as if each rank were one; and up to how many of them that is less than dense gradients."""
    n = stages[0].grid.count(REPLICAS)
    if not config.comm.compress:
        return
    if n == 1:
        yield f'comm.compress = "{config.comm.compress}" has no effect: no other rank has the same parameters'
        return
    make = make_compressor(config.comm.compress, config.folder)
    costs = [cost_of(config, p, make, n, config.comm.compress_feedback) for p in stages]
    largest = max(costs, key=lambda cost: cost.dense)
    where = "" if config.comm.compress_force else ", on nodes of their own; on one node it has no effect"
    yield (f"gradients as {make.text} between {n} workers{where}: {largest.sent:,} bytes of a rank and step instead of "
           f"{largest.dense:,}; {largest.kept / MIB:.2f} MiB of state")
    wider = [make.wider(times) for times in STAGES] if config.comm.compress_warmup else []
    for part, wide in enumerate(filter(None, wider)):
        sent = max(cost_of(config, p, wide, n, config.comm.compress_feedback).sent for p in stages)
        yield f"  {sent:,} bytes in part {part + 1} of {len(wider)} of the {config.comm.compress_warmup} steps of its warm-up"
    if make.kind == "gathered":
        message = largest.sent / (n - 1)                      # of one worker, which goes to all others
        size = 4 * sum(s.stop - s.start for s in max(stages, key=lambda p: p.layout().size).layout().segments)
        yield (f"  a worker's message goes to all others: fewer bytes than dense gradients between fewer than "
               f"{max(2 * size / message, 2):,.0f} workers")


def _steps(config: Config, n: int, length: int) -> Algorithm:
    name = config.comm.algorithm
    return choose(name if isinstance(name, str) else "auto", n, 4 * length)

