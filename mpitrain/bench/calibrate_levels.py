"""What ranks exchange costs, for each number of ranks: within a node by shared memory and by messages, between nodes by messages.

    ranks 0 1          all-reduces of 8 B to 8 MiB by both ways, messages to and fro, steps with next to nothing to compute
    ranks 0 1 2        the same
    one rank a node    all-reduces by messages                         where there are several nodes

Times of all-reduces become the alpha, beta and gamma under which the algorithm that "auto" chooses for each size takes as long,
nearest in relative error; so alpha has the interpreter's part of a message in it, and more ranks than cores cost what they cost.
Of repeated measurements the lower quartile counts: what else a host does can only add to them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import CPU
from mpitrain.bench.allreduce import Side, contender
from mpitrain.bench.calibrate_busy import halves, together
from mpitrain.bench.inputs import Inputs
from mpitrain.bench.pairs import Clock, Unavailable, quartiles
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress
from mpitrain.models import mlp
from mpitrain.nn import LOSSES
from mpitrain.optim import AdamW
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.plan.planner.timing import time_blocks
from mpitrain.schedules.collectives import choose
from mpitrain.schedules.fit import non_negative
from mpitrain.schedules.level_times import ITEM
from mpitrain.schedules.simulate import Machine, finish_times
from mpitrain.train.observers import Observer

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
SHARED = "shared"
TURNS, PROBES, STEPS = 12, 40, 160                            # of sums, of messages, of steps
SENT = (8, 4 << 10, 64 << 10, 1 << 20)                        # bytes of messages between stages
HIDDEN = 2 << 20                                              # bytes of an exchange that is to hide behind work
SEVERAL = 4                                                   # collectives that are to travel together, of as many bytes
TINY = (8, 8, 2, 4)                                           # inputs, hidden, outputs and rows of a model that computes nothing


class Costs(NamedTuple):
    """Seconds of a message, of a byte sent and of a byte added up, as far as `seconds` (of so many bytes) tell them apart."""

    alpha: float
    beta: float
    gamma: float
    points: list[list[float]]


def on_some(channel: Channel, world: World, ranks: Sequence[int], measure: Callable[[World], Any]) -> Any:
    """What `measure` finds on these ranks, a world of their own, while the others sleep; every rank gets the first one's.
    Collective."""
    inside, found = world.rank in ranks, None
    comm: Any = world.comm.Split(int(inside), world.rank)
    if inside:
        found = measure(World(comm, comm.rank, comm.size))
    together(world)
    comm.Free()
    return channel.broadcast_object(found, ranks[0])


def nodes_of(channel: Channel) -> list[list[int]]:
    """The ranks of each host, in the order of their first ones. Collective."""
    hosts = channel.gather_objects(socket.gethostname())
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def all_reduces(world: World, way: str, *, link: bool = False, sizes: Sequence[int] = SIZES, turns: int = TURNS) -> Costs | None:
    """The costs of all-reduces by shared memory or by messages; None where memory cannot be shared. Over a `link` medians count:
    that its directions take turns now and then (see benchmarks/two_hosts.py) is its own affair. Collective."""
    try:
        side = Side(way, contender(way, world), world, sizes)
    except Unavailable:
        return None
    points = []
    for size in sizes:
        inputs = Inputs(max(1, size // ITEM), "float32", world.size)
        times = [side.turn(inputs, number) for number in range(turns + 1)]
        points.append([float(size), statistics.median(times[1:]) if link else quartiles(times[1:])[0]])
    side.close()
    return costs(world.size, points)


def costs(n: int, points: Sequence[Sequence[float]]) -> Costs:
    """The costs under which "auto"'s algorithms of n ranks take the seconds of these (bytes, seconds), nearest in relative error.

    A way's time is alpha x messages + beta x bytes sent + gamma x bytes added up, its longest way; where the sizes do not tell
    beta from gamma, beta has both.
    """
    ways = [max(finish_times(choose("auto", n, int(size)), n, ceil(size / ITEM), ITEM, Machine(1e-6, 2e-10, 1e-10)))
            for size, _ in points]
    counts = np.array([(way.messages, way.sent) for way in ways], np.float64)
    alpha, beta = non_negative(counts, np.array([seconds for _, seconds in points]))
    return Costs(alpha, beta, 0.0, [list(point) for point in points])


def hidden_share(world: World) -> float:
    """The share of an exchange by messages that goes on while the rank computes: 1 where others move the bytes, 0 where its own
    core does. Collective.

    Several all-reduces are started, as buckets are, backwards that take about as long follow, and the all-reduces are waited for:
    (exchange alone + work alone - both) / the shorter of the two alone. Forwards, in which nobody looks at messages, come before.
    """
    progress, clock = Progress(), Clock(world)
    channel = Channel(world.comm.Dup(), "calibrate", progress=progress)
    arrays, (forward, backward) = parts_of_exchange(), halves(progress.progress)

    def work(outputs: Sequence[Any]) -> None:
        for output in outputs:
            backward(output)

    def both(outputs: Sequence[Any]) -> None:
        exchanges = [channel.start_allreduce(array, "probe") for array in arrays]
        work(outputs)
        for exchange in exchanges:
            exchange.wait()

    def seconds(action: Callable[[Sequence[Any]], None], calls: int) -> float:
        return clock.time(partial(action, [forward() for _ in range(calls)]))
    work([forward()])
    both([])
    calls = max(1, round(seconds(both, 0) / seconds(work, 1)))
    times = [[seconds(work, calls), seconds(both, 0), seconds(both, calls)] for _ in range(TURNS)]
    computing, exchanging, together_s = (statistics.median(column) for column in zip(*times))
    channel.close()
    return float(min(1.0, max(0.0, (computing + exchanging - together_s) / min(computing, exchanging))))


def parts_of_exchange() -> list[Any]:
    """The arrays of several all-reduces that are on their way together."""
    return [np.zeros(HIDDEN // SEVERAL // ITEM, np.float32) for _ in range(SEVERAL)]


def at_once(world: World) -> float:
    """Seconds a byte of several all-reduces by messages that are on their way together, as buckets of gradients are: while one
    waits for the others' part of a round, the bytes of the next one travel. Collective."""
    channel, clock = Channel(world.comm.Dup(), "calibrate"), Clock(world)
    arrays = parts_of_exchange()

    def run() -> None:
        for work in [channel.start_allreduce(array, "probe") for array in arrays]:
            work.wait()
    run()
    seconds = statistics.median(clock.time(run) for _ in range(TURNS))
    channel.close()
    return seconds / HIDDEN


def messages(world: World) -> list[list[float]]:
    """(bytes, seconds) of a message between two stages of a pipeline, as these send and take it; half of there and back."""
    link, points = Link(world.comm.Dup(), "calibrate", Progress()), []
    peer = 1 - world.rank
    for size in SENT:
        array, times = np.zeros(size, np.uint8), []
        for _ in range(PROBES):
            if world.rank == 0:
                began = time.perf_counter()
                link.send(array, peer, 0, "a probe")
                link.receive(array.shape, array.dtype, peer, 1, "a probe").wait()
                times.append((time.perf_counter() - began) / 2)
            else:
                link.receive(array.shape, array.dtype, peer, 0, "a probe").wait()
                link.send(array, peer, 1, "a probe")
            link.finish()
        points.append([float(size), quartiles(times)[0] if times else 0.0])
    link.close()
    return points


class Steps(Observer):
    """The moments at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, step: int, fields: Any, seconds: float) -> None:
        self.ends.append(time.perf_counter())


def empty_step(world: World) -> float:
    """Seconds of a training step of data-parallel ranks beside its compute: the loop, its data, its small collectives, Python.
    Collective."""
    inputs, hidden, outputs, rows = TINY
    workload = Workload(lambda: mlp(inputs, [hidden], outputs), rows, (inputs,), outputs, 1)
    training = Training(workload, world.comm, sections={"train": {"steps": STEPS, "eval_every": STEPS + 1},
                                                        "log": {"every": STEPS}})
    steps = Steps()
    training.job.trainer.observers.append(steps)
    training.job.trainer.update.want_norm = False
    training.job.fit()
    training.close()
    step = quartiles(np.diff(steps.ends[STEPS // 4:]).tolist())[0]
    x, y = workload.samples(rows, 0)
    timed = time_blocks(workload.make(), x, y, loss=LOSSES["cross_entropy"](), optimizer=lambda storage: AdamW(storage, lr=1e-3),
                        seed=0, precision="float32", feed=lambda storage: Feed(CPU, storage.dtype))
    return max(0.0, step - sum(timed.forward) - sum(timed.backward) - timed.update)
