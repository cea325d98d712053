"""What ranks that share memory cost each other: Python's part of a collective, turns on shared cores, the sums of layers.

    bucket of gradients    [start ......... wait]     the interpreter's seconds, over one call that does all
    equal work             rank 0 [compute     ][asleep]      as long as the slowest, over its processor time: more ranks than
                           rank 1 [compute            ]       cores take turns, in the way of this host's scheduler
    sum of a layer         every rank adds up what all show, into a new array
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mpitrain.bench.calibrate_busy import block, together
from mpitrain.bench.pairs import Clock, quartiles
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.node import Node
from mpitrain.parallel.layers.tensor_functions import Group
from mpitrain.schedules.level_times import ITEM

TURNS, PROBES = 12, 40                     # measurements, and calls in one of them
WORK, REPEATS = 0.025, 25                  # seconds of computing between two barriers, as in a step of training, and how often
SUMS, SUMS_AT_ONCE = (1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20), 4      # bytes of sums of layers


@contextmanager
def sharing(world: World) -> Iterator[SharedChannel]:
    """A channel of ranks that share memory. Collective."""
    messages = Channel(world.comm.Dup(), "calibrate")
    comm: Any = messages.comm
    node = Node(comm, messages.progress)
    channel = SharedChannel(messages, node)
    yield channel
    channel.close()
    node.close()


def by_shared_memory(world: World) -> tuple[float, float]:
    """(the interpreter's seconds of a collective, how many times its processor time equal work takes). Collective."""
    with sharing(world) as channel:
        array, clock = channel.allocate(8).view(np.float64), Clock(world)
        prepared = channel.prepare(array, "probe")
        both = [[clock.time(partial(often, run, PROBES)) / PROBES for _ in range(TURNS)]
                for run in (prepared.run, lambda: prepared.start().wait())]
        alone, apart = (quartiles(times)[0] for times in both)
        return max(0.0, apart - alone), in_turns(channel, prepared.run)


def often(run: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        run()


def in_turns(channel: SharedChannel, barrier: Callable[[], Any]) -> float:
    """How many times its processor time the same work takes, until `barrier` says that all ranks have done it."""
    run = block()
    run()
    spent = time.thread_time()
    run()
    calls, ratios = max(1, round(WORK / (time.thread_time() - spent))), []
    calls = channel.messages.broadcast_object(calls)
    for _ in range(REPEATS):
        barrier()
        began, spent = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            run()
        spent = time.thread_time() - spent
        barrier()
        ratios.append((time.perf_counter() - began) / spent)
    everyone = channel.messages.gather_objects(statistics.median(ratios))
    return float(max(1.0, statistics.median(everyone)))


def layer_sums(world: World, sizes: Sequence[int] = SUMS) -> dict[str, list[list[float]]]:
    """(bytes, seconds) of the sums that layers cut along tp wait for, in all groups of 2, ... ranks at once, by the ranks of a
    group. Collective."""
    found = {}
    for size in (size for size in range(2, world.size + 1) if world.size % size == 0):
        comm: Any = world.comm.Split(world.rank // size, world.rank)
        part, points = World(comm, comm.rank, comm.size), []
        with sharing(part) as channel:
            group, clock = Group(channel), Clock(part)
            for nbytes in sizes:
                run = partial(group.sum, np.ones(nbytes // ITEM, np.float32), "probe")
                times = [clock.time(partial(often, run, SUMS_AT_ONCE)) / SUMS_AT_ONCE for _ in range(TURNS)]
                points.append([float(nbytes), quartiles(times[1:])[0]])
        together(world)
        comm.Free()
        found[str(size)] = points
    return found
