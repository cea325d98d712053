"""What ranks exchange costs, for each number of ranks: within a node by shared memory and by messages, between nodes by messages.

    ranks 0 1          all-reduces of 8 B to 4 MiB by both ways, messages to and fro, steps with next to nothing to compute
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
from mpitrain.bench.calibrate_busy import block, together
from mpitrain.bench.inputs import Inputs
from mpitrain.bench.pairs import Clock, Unavailable, quartiles
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.node import Node
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

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SHARED = "shared"
TURNS, PROBES, STEPS = 12, 40, 160
SENT = (8, 4 << 10, 64 << 10, 1 << 20)                        # bytes of messages between stages
WORK, REPEATS = 0.025, 25                                     # seconds of computing between two barriers, and how often
TINY = (8, 8, 2, 4)                                           # inputs, hidden, outputs and rows of a model that computes nothing


class Costs(NamedTuple):
    """Seconds of a message, of a byte sent and of a byte added up, as far as `seconds` (of so many bytes) tell them apart."""

    alpha: float
    beta: float
    gamma: float
    points: list[list[float]]


def on_some(world: World, ranks: Sequence[int], measure: Callable[[World], Any]) -> Any:
    """What `measure` finds on these ranks, a world of their own, while the others sleep; every rank gets the first one's.
    Collective."""
    inside, found = world.rank in ranks, None
    comm: Any = world.comm.Split(int(inside), world.rank)
    if inside:
        found = measure(World(comm, comm.rank, comm.size))
    together(world)
    comm.Free()
    return world.comm.bcast(found, root=ranks[0])


def nodes_of(world: World) -> list[list[int]]:
    """The ranks of each host, in the order of their first ones. Collective."""
    hosts = world.comm.allgather(socket.gethostname())
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def all_reduces(world: World, way: str, sizes: Sequence[int] = SIZES, turns: int = TURNS) -> Costs | None:
    """The costs of all-reduces by shared memory or by messages; None where memory cannot be shared. Collective."""
    try:
        side = Side(way, contender(way, world), world, sizes)
    except Unavailable:
        return None
    points = []
    for size in sizes:
        inputs = Inputs(max(1, size // ITEM), "float32", world.size)
        times = [side.turn(inputs, number) for number in range(turns + 1)]
        points.append([float(size), quartiles(times[1:])[0]])
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


def by_shared_memory(world: World) -> tuple[float, float]:
    """Of ranks that share memory: (the interpreter's seconds of a collective, how many times longer equal work takes on all of
    them than its processor time). Collective.

    The interpreter's seconds are those of a small all-reduce which is started and waited for, as a bucket of gradients is, over
    one that is run in one call. More ranks than cores take turns, in the way of this host's scheduler: each rank computes for
    about as long as a step of training, and sleeps in an all-reduce until the last one is there.
    """
    channel_of_messages = Channel(world.comm.Dup(), "calibrate")
    comm: Any = channel_of_messages.comm
    node = Node(comm, channel_of_messages.progress)
    channel = SharedChannel(channel_of_messages, node)
    array, clock = channel.allocate(8).view(np.float64), Clock(world)
    prepared = channel.prepare(array, "probe")

    def often(run: Callable[[], Any]) -> None:
        for _ in range(PROBES):
            run()
    both = [[clock.time(partial(often, run)) / PROBES for _ in range(TURNS)]
            for run in (prepared.run, lambda: prepared.start().wait())]
    alone, apart = (quartiles(times)[0] for times in both)
    longer = in_turns(world, prepared.run)
    channel.close()
    node.close()
    return max(0.0, apart - alone), longer


def in_turns(world: World, barrier: Callable[[], Any]) -> float:
    """How many times its processor time the same work takes, until `barrier` says that all ranks have done it."""
    run = block()
    run()
    spent = time.thread_time()
    run()
    calls, ratios = max(1, round(WORK / (time.thread_time() - spent))), []
    calls = world.comm.bcast(calls, root=0)
    for _ in range(REPEATS):
        barrier()
        began, spent = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            run()
        spent = time.thread_time() - spent
        barrier()
        ratios.append((time.perf_counter() - began) / spent)
    everyone = world.comm.allgather(statistics.median(ratios))
    return float(max(1.0, statistics.median(everyone)))


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
