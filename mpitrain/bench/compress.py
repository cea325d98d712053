"""What compressors cost: seconds and bytes for each byte of gradient, on one core.

Time is the processor's, so that other programs do not count. Encoding is that of one worker with its residual, in all phases;
decoding that of one message, added to a sum. A record has what the simulator takes: `kind`, `rate`, `encode`, `decode` and
`phases` of `schedules.simulate_levels.Coding`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.report import Report, in_bytes, machine
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.compress.check import check_compressor
from mpitrain.parallel.compress.compressor import Make, Piece

ITEM = 4                                          # bytes: float32
MIB = 1 << 20
PROVED = [Piece("matrix", 0, 6000, 0, (60, 100)), Piece("vector", 6000, 6100, 0, (100,))]     # a user's own, before it is timed


class Cost(NamedTuple):
    """Bytes of all messages of one worker, and seconds of each repetition."""

    nbytes: int
    encode: list[float]
    decode: list[float]


def bench_compress(channel: Channel, world: World, report: Report, *, makes: Sequence[Make], elements: int, repeats: int) -> None:
    """Prints a line and writes a record for each compressor; rank 0 measures, the others wait."""
    about = machine(channel)
    for make in makes:
        if make.own:
            check_compressor(make, 2, PROVED)
    pieces, nbytes = pieces_of(elements), elements * ITEM
    report.line(f"{elements} float32, {in_bytes(nbytes)}; ms a MiB: median (lowest)")
    report.line(f"{'compressor':<18}{'kind':<10}{'bytes':>12}{'ratio':>8}{'encode':>18}{'decode':>18}")
    for make in makes:
        cost = Cost(*channel.broadcast_object(measured(make, pieces, repeats) if world.rank == 0 else None))
        encode, decode = statistics.median(cost.encode), statistics.median(cost.decode)
        report.line(f"{make.text:<18}{make.kind:<10}{cost.nbytes:>12}{nbytes / max(cost.nbytes, 1):>8.1f}"
                    f"{in_mib(cost.encode, nbytes):>18}{in_mib(cost.decode, nbytes):>18}")
        report.record({"bench": "compress", "compressor": make.text, "kind": make.kind, "elements": elements,
                       "bytes": cost.nbytes, "rate": cost.nbytes / nbytes, "encode": encode / nbytes, "decode": decode / nbytes,
                       "encode_lowest": min(cost.encode) / nbytes, "decode_lowest": min(cost.decode) / nbytes,
                       "phases": getattr(make.cls, "phases", 1), "machine": about})


def in_mib(times: Sequence[float], nbytes: int) -> str:
    return f"{statistics.median(times) * 1e3 * MIB / nbytes:.3f} ({min(times) * 1e3 * MIB / nbytes:.3f})"


def pieces_of(elements: int) -> list[Piece]:
    """A matrix as square as a power of two of rows makes it, and a vector of what remains."""
    rows = 1 << (isqrt(elements).bit_length() - 1)
    matrix = elements // rows * rows
    rest = [Piece("vector", matrix, elements, 0, (elements - matrix,))] if matrix < elements else []
    return [Piece("matrix", 0, matrix, 0, (rows, matrix // rows)), *rest]


def measured(make: Make, pieces: Sequence[Piece], repeats: int) -> Cost:
    compressor: Any = make(pieces, 2)
    state = compressor.new_state()
    values = np.random.default_rng(0).standard_normal(compressor.length).astype(np.float32)
    total, cost = np.zeros_like(values), Cost(0, [], [])
    for step in range(repeats + 1):                          # the first one warms up
        calls, nbytes = _calls(compressor, step, values, state, total)
        seconds = [_seconds(call) for call in calls]
        cost = Cost(nbytes, [*cost.encode, sum(seconds[0::2])], [*cost.decode, sum(seconds[1::2])])
    return cost._replace(encode=cost.encode[1:], decode=cost.decode[1:])


def _calls(compressor: Any, step: int, values: Any, state: Any, total: Any) -> tuple[list[Callable[[], object]], int]:
    """To encode and to decode in turns, each phase; and bytes of the messages."""
    if compressor.kind == "linear":
        messages = [np.zeros(compressor.words(phase), np.float32) for phase in range(compressor.phases)]
        return [partial(call, phase, step, *arguments) for phase, message in enumerate(messages)
                for call, arguments in ((compressor.encode, (values, state, message)),
                                        (compressor.decode, (message, state, total)))], sum(m.nbytes for m in messages)
    if compressor.kind == "gathered":
        message = np.zeros(compressor.nbytes(), np.uint8)
        return [partial(compressor.encode, step, values, state, message), partial(compressor.decode, step, message[None], total)
                ], len(message)
    blocks = compressor.blocks
    message = np.zeros(compressor.nbytes(0, blocks), np.uint8)
    return [partial(compressor.encode, step, 0, values, state.get("error"), 0, blocks, message),
            partial(compressor.decode, message, 0, blocks, total, True)], len(message)


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began
