"""What one rank does for one collective on arrays of one size: made once, kept, and run as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.comm.messages.packing import compacted, packed
from mpitrain.comm.messages.program import MESSAGE_BYTES, Messages, Part, lanes, needed, plain, segment_count, translate
from mpitrain.schedules.steps import Algorithm

# A part longer than this is cut. Over shared memory, where the processor itself moves the bytes, cutting only costs: the ring,
# 16 MiB of float32, 2 ranks, MPI_Allreduce's time over ours in one alternating run (Open MPI 5.0.11, 2 cores, 2026-11): parts of
# 256 KiB 0.64, 512 KiB 0.74, 1 MiB 0.79, 2 MiB 0.81, not cut 0.96.
SEGMENT_BYTES = 64 << 20


class Plan(NamedTuple):
    """Programs to run side by side, and how many elements they use of each buffer besides the data."""

    programs: list[list[Messages]]
    elements: dict[str, int]


class Cut(NamedTuple):
    """How long messages may be: `segment_bytes` for the sake of overlap, `message_bytes` because MPI counts in 32 bits."""

    segment_bytes: int = SEGMENT_BYTES
    message_bytes: int = MESSAGE_BYTES


def make_plan(algorithm: Algorithm, rank: int, n: int, length: int, itemsize: int, cut: Cut,
              results: Sequence[tuple[int, int]] | None = None, on_all_ranks: bool = False) -> Plan:
    """The plan of one rank. With `results` (the elements [start, stop) that count at the end) messages are packed to 16 bits;
    what is the result `on_all_ranks` is rounded on all of them, so that it has the same bits."""
    program = plain(algorithm(rank, n, length))
    if results is not None:
        program = packed(program, [Part("data", start, stop) for start, stop in results], on_all_ranks)
    stages = lanes(program, segment_count(algorithm, n, length, itemsize, cut.segment_bytes))
    if results is not None:
        stages = compacted(stages)
    sizes = {"data": itemsize, "inbox": itemsize, "data16": 2, "inbox16": 2}
    return Plan([translate(program, sizes, cut.message_bytes) for program in stages],
                {buffer: needed(stages, buffer) for buffer in ("inbox", *(("data16", "inbox16") if results is not None else ()))})
