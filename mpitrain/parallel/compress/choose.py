"""Whether the gradients of a run travel compressed, and what the run says about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpitrain.comm.face import AnyChannel, Objects
from mpitrain.comm.messages.algorithms import hosts_of
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.config import Config
from mpitrain.nn import FlatLayout
from mpitrain.parallel.compress.channel import CompressedSum
from mpitrain.parallel.compress.compressor import STAGES, CompressError, Make, Piece, make_compressor
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.placement.buckets import Bucket

MIB = 2**20


def several_nodes(channel: AnyChannel) -> bool:
    """Whether the channel's ranks are on more than one. Collective."""
    if isinstance(channel, SharedChannel):
        return channel.node.size < channel.size
    return len(set(hosts_of(channel.comm))) > 1


def why_dense(config: Config, channel: AnyChannel) -> str:
    """The reason why gradients travel as they are; empty text where they are compressed. Collective."""
    comm = config.comm
    what = f'comm.compress = "{comm.compress}" has no effect'
    if channel.size == 1:
        return f"{what}: no other rank has the same parameters"
    if not comm.compress_force and not several_nodes(channel):
        return (f"{what}: all {channel.size} ranks are on one node, whose memory adds up gradients in less time than encoding "
                "takes; comm.compress_force = true uses it all the same")
    return ""


def choose(config: Config, channel: AnyChannel, layout: FlatLayout, step: Callable[[], int]) -> CompressedSum | str:
    """The compressed sum of a run's gradients, or the reason why it has none. Collective over the channel."""
    if why := why_dense(config, channel):
        return why
    comm = config.comm
    make = make_compressor(comm.compress, config.folder)
    return CompressedSum(channel, layout, make, step=step, seed=config.run.seed, feedback=comm.compress_feedback,
                         after=comm.compress_after, warmup=comm.compress_warmup)


def open_sum(found: CompressedSum, buckets: Sequence[Bucket], control: Objects) -> list[str]:
    """Ready for steps; notes for the run to say. CompressError, on all ranks, for a compressor of the user's own that is wrong at
    the sizes of this model. It communicates."""
    found.connect()
    pieces = pieces_of(found.layout.segments, 0, found.layout.size)
    prove_own(found.make, found.workers, pieces, control, seed=found.seed, feedback=found.feedback, first=found.worker == 0)
    found.open(buckets)
    return notes_of(found)


def prove_own(make: Make, n: int, pieces: Sequence[Piece], control: Objects, *, seed: int, feedback: bool, first: bool) -> None:
    """CompressError, on all ranks of `control`, for a compressor of the user's own that is wrong for arrays of `pieces` between n
    workers. Ranks that are `first` of those with the same array look. It communicates if there is something to prove."""
    if not make.own:
        return
    from mpitrain.parallel.compress.check import check_compressor
    wrong = ""
    try:
        if first:
            check_compressor(make, n, pieces, seed=seed, feedback=feedback)
    except CompressError as error:
        wrong = error.message
    if wrong := next(filter(None, control.gather_objects(wrong)), ""):
        raise CompressError(wrong)


def notes_of(found: CompressedSum) -> list[str]:
    """What travels, and what it costs in memory."""
    between = f"between {found.workers} nodes, added up in float32 inside" if found.shared is not None else \
        f"between {found.workers} ranks"
    dense, sent = found.dense_bytes, found.coded_bytes
    first = f" after {found.after} dense steps" if found.after else ""
    times, warmup = " and ".join(map(str, STAGES)), found.settled - found.after
    warm = f", {times} times the share in the first {warmup}" if found.stages else ""
    kept = f"its state takes {found.state_bytes / MIB:.2f} MiB of a rank" if found.state_bytes else "nothing is kept"
    own = [note for part in found.parts.values() if part.exchange is not None for exchange in (*part.first, part.exchange)
           for note in exchange.compressor.notes]
    return [f"gradients travel as {found.make.text} {between}{first}: {sent:,} bytes of a rank and step instead of {dense:,}"
            f"{warm}; {kept}", *dict.fromkeys(own)]
