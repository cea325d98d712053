"""The machine as alpha, beta and gamma, found in two ways, and what they predict beside what is measured.

`direct`: beta and alpha from messages between two ranks and back, gamma from sums in memory. That is what the hardware and MPI
cost. `fitted`: from timed all-reduces, with the interpreter's own seconds of a collective and of each of its messages, and beta
with what all ranks sending at once leave of the bandwidth. Every second size is kept out of the fit: its prediction is one.

    a round of ours        collective_s + messages x (alpha + message_s) + bytes x beta + sums x gamma, along the longest way
    two ranks, in C        messages x alpha + ...                        small arrays by recursive doubling need no interpreter
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.allreduce import Side, contender
from mpitrain.bench.inputs import Inputs
from mpitrain.bench.report import Report, in_bytes, in_time, machine
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.interpreter import PAIR_BYTES
from mpitrain.schedules import fit as fitting
from mpitrain.schedules.collectives import ALL_REDUCE
from mpitrain.schedules.fit import non_negative
from mpitrain.schedules.simulate import Machine, simulate

ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "direct")
SIZES = [1 << k for k in range(10, 24)]                           # 1 KiB to 8 MiB
MESSAGES = [8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20]    # Messages of so many bytes go to and fro between two ranks.
SUMS = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
SMALL = 64 << 10                                                  # bytes up to which the interpreter's part is looked at
ITEM = 4                                                          # bytes: float32


class Costs(NamedTuple):
    """A machine, and the interpreter's seconds of a collective and of a message."""

    alpha: float
    beta: float
    gamma: float
    collective_s: float = 0.0
    message_s: float = 0.0


class Point(NamedTuple):
    """A measured all-reduce; `fitted` says whether the fit has seen it."""

    algorithm: str
    nbytes: int
    seconds: float
    fitted: bool


def bench_fit(channel: Channel, world: World, report: Report, *, sizes: Sequence[int], turns: int) -> Costs:
    """Measures, fits and prints; one record. Collective; every rank gets the same machine."""
    about = machine(channel)
    direct = measured_directly(channel, world, turns)
    points = measured_points(world, sizes, turns)
    fitted = fit([point for point in points if point.fitted], world.size, direct.alpha)
    report.line(f"{'':<10}{'alpha':>12}{'beta':>14}{'gamma':>14}")
    for name, found in (("direct", direct), ("fitted", fitted)):
        report.line(f"{name:<10}{found.alpha * 1e6:>9.2f} us{found.beta * 1e9:>9.4f} ns/B{found.gamma * 1e9:>9.4f} ns/B")
    report.line(f"Python takes {in_time(fitted.collective_s)} of a collective and {in_time(fitted.message_s)} of each message")
    report.line(f"\n{'algorithm':<24}{'bytes':>10}{'measured':>12}{'predicted':>12}{'of it':>8}   from direct")
    rows = []
    for point in points:
        guess, plain = (predicted(point.algorithm, point.nbytes, world.size, found) for found in (fitted, direct))
        rows.append({"algorithm": point.algorithm, "bytes": point.nbytes, "seconds": point.seconds, "predicted_seconds": guess,
                     "direct_seconds": plain, "fitted": point.fitted})
        report.line(f"{point.algorithm:<24}{in_bytes(point.nbytes):>10}{in_time(point.seconds):>12}{in_time(guess):>12}"
                    f"{guess / point.seconds:>8.2f}{in_time(plain):>14}{'' if point.fitted else '   not in the fit'}")
    small = sorted(predicted(p.algorithm, p.nbytes, world.size, fitted) / p.seconds for p in points if p.nbytes <= SMALL)
    if small:
        report.line(f"up to {in_bytes(SMALL)}: predicted over measured {statistics.median(small):.2f}, from {small[0]:.2f} to "
                    f"{small[-1]:.2f}")
    report.record({"bench": "fit", "ranks": world.size, "dtype": "float32", **fitted._asdict(), "direct": direct._asdict(),
                   "points": rows, "machine": about})
    return fitted


def in_c(algorithm: str, nbytes: int, n: int) -> bool:
    """Whether C runs the rounds of an all-reduce, without the interpreter."""
    return n == 2 and algorithm == "recursive_doubling" and nbytes <= PAIR_BYTES


def predicted(algorithm: str, nbytes: int, n: int, found: Costs) -> float:
    """Seconds of an all-reduce of n ranks."""
    own = Costs(*found[:3]) if in_c(algorithm, nbytes, n) else found
    return own.collective_s + simulate(ALL_REDUCE[algorithm], n, nbytes // ITEM, ITEM,
                                       Machine(own.alpha + own.message_s, own.beta, own.gamma))


def fit(points: Sequence[Point], n: int, alpha: float = math.inf) -> Costs:
    """The costs whose predictions are closest to the points, in squares of relative errors; none is negative.

    Where no point is without the interpreter, its part of a message is what there is beyond `alpha`, that of a message of MPI.
    """
    by_c = [in_c(p.algorithm, p.nbytes, n) for p in points]
    samples = [fitting.Sample(ALL_REDUCE[p.algorithm], n, p.nbytes, p.seconds, not alone) for p, alone in zip(points, by_c)]
    found, collective_s, message_s = fitting.fit_interpreted(samples, ITEM)
    if not any(by_c):
        message_s = max(0.0, found.alpha - alpha)
        found = found._replace(alpha=found.alpha - message_s)
    return Costs(found.alpha, found.beta, found.gamma, collective_s, message_s)


def measured_points(world: World, sizes: Sequence[int], turns: int) -> list[Point]:
    points = []
    for name in ALGORITHMS:
        side = Side(name, contender(name, world), world, sizes)
        for i, size in enumerate(sizes):
            inputs = Inputs(size // ITEM, "float32", world.size)
            times = [side.turn(inputs, number) for number in range(turns + 1)]
            points.append(Point(name, size, statistics.median(times[1:]), fitted=i % 2 == 0))
        side.close()
    return points


def measured_directly(channel: Channel, world: World, turns: int) -> Costs:
    """From messages to and fro between ranks 0 and 1, and sums on rank 0; the other ranks wait and are told."""
    found = [0.0, 0.0, 0.0]
    if world.rank < 2:
        one_way = [to_and_fro(world, size, turns) / 2 for size in MESSAGES]
        found[:2] = non_negative(np.array([[1.0, size] for size in MESSAGES]), np.array(one_way))
        sums = [sum_in_memory(size, turns) for size in SUMS]
        found[2] = non_negative(np.array([[1.0, size] for size in SUMS]), np.array(sums))[1]
    return Costs(*channel.broadcast_object(found))


def to_and_fro(world: World, nbytes: int, turns: int) -> float:
    """Median seconds of a message to the other of ranks 0 and 1 and one of the same size back."""
    message, peer = np.ones(nbytes, np.uint8), 1 - world.rank

    def there_and_back() -> None:
        for sending in (world.rank == 0, world.rank == 1):
            if sending:
                world.comm.Send(message, peer)
            else:
                world.comm.Recv(message, peer)
    return median_time(there_and_back, turns)


def sum_in_memory(nbytes: int, turns: int) -> float:
    """Median seconds to add an array of `nbytes` to another."""
    left, right = np.ones(nbytes // ITEM, np.float32), np.ones(nbytes // ITEM, np.float32)
    return median_time(lambda: np.add(left, right, out=left), turns)


def median_time(run: Callable[[], Any], turns: int) -> float:
    times = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
