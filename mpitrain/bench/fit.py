"""The machine as alpha, beta and gamma, found in two ways, and what they predict beside what is measured.

`direct`: beta and alpha from messages between two ranks and back, gamma from sums in memory. That is what the hardware and MPI
cost. `fitted`: from timed all-reduces, so alpha has the interpreter's time for a round in it, and beta what all ranks sending at
once leave of the bandwidth. Every second size is kept out of the fit: its prediction is one.
"""

from __future__ import annotations

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
from mpitrain.schedules import fit as fitting
from mpitrain.schedules.collectives import ALL_REDUCE
from mpitrain.schedules.fit import non_negative
from mpitrain.schedules.simulate import Machine, simulate

ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "direct")
SIZES = [1 << k for k in range(10, 24)]                           # 1 KiB to 8 MiB
MESSAGES = [8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20]    # Messages of so many bytes go to and fro between two ranks.
SUMS = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
ITEM = 4                                                          # bytes: float32


class Point(NamedTuple):
    """A measured all-reduce; `fitted` says whether the fit has seen it."""

    algorithm: str
    nbytes: int
    seconds: float
    fitted: bool


def bench_fit(channel: Channel, world: World, report: Report, *, sizes: Sequence[int], turns: int) -> Machine:
    """Measures, fits and prints; one record. Collective; every rank gets the same machine."""
    about = machine(channel)
    direct = measured_directly(channel, world, turns)
    points = measured_points(world, sizes, turns)
    fitted = fit([point for point in points if point.fitted], world.size)
    report.line(f"{'':<10}{'alpha':>12}{'beta':>14}{'gamma':>14}")
    for name, found in (("direct", direct), ("fitted", fitted)):
        report.line(f"{name:<10}{found.alpha * 1e6:>9.2f} us{found.beta * 1e9:>9.4f} ns/B{found.gamma * 1e9:>9.4f} ns/B")
    report.line(f"\n{'algorithm':<24}{'bytes':>10}{'measured':>12}{'predicted':>12}{'of it':>8}   from direct")
    rows = []
    for point in points:
        guess, plain = (predicted(point.algorithm, point.nbytes, world.size, found) for found in (fitted, direct))
        rows.append({"algorithm": point.algorithm, "bytes": point.nbytes, "seconds": point.seconds, "predicted_seconds": guess,
                     "direct_seconds": plain, "fitted": point.fitted})
        report.line(f"{point.algorithm:<24}{in_bytes(point.nbytes):>10}{in_time(point.seconds):>12}{in_time(guess):>12}"
                    f"{guess / point.seconds:>8.2f}{in_time(plain):>14}{'' if point.fitted else '   not in the fit'}")
    report.record({"bench": "fit", "ranks": world.size, "dtype": "float32", **costs(fitted),
                   "direct": costs(direct), "points": rows, "machine": about})
    return fitted


def costs(found: Machine) -> dict[str, float]:
    return {"alpha": found.alpha, "beta": found.beta, "gamma": found.gamma}


def predicted(algorithm: str, nbytes: int, n: int, found: Machine) -> float:
    return simulate(ALL_REDUCE[algorithm], n, nbytes // ITEM, ITEM, found)


def fit(points: Sequence[Point], n: int) -> Machine:
    """The machine whose predictions are closest to the points, in squares of relative errors; no number is negative."""
    return fitting.fit([fitting.Sample(ALL_REDUCE[p.algorithm], n, p.nbytes, p.seconds) for p in points], ITEM)


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


def measured_directly(channel: Channel, world: World, turns: int) -> Machine:
    """From messages to and fro between ranks 0 and 1, and sums on rank 0; the other ranks wait and are told."""
    found = [0.0, 0.0, 0.0]
    if world.rank < 2:
        one_way = [to_and_fro(world, size, turns) / 2 for size in MESSAGES]
        found[:2] = non_negative(np.array([[1.0, size] for size in MESSAGES]), np.array(one_way))
        sums = [sum_in_memory(size, turns) for size in SUMS]
        found[2] = non_negative(np.array([[1.0, size] for size in SUMS]), np.array(sums))[1]
    return Machine(*channel.broadcast_object(found))


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
