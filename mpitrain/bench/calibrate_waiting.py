"""What a rank that waits for a message takes of the cores from those that compute, where ranks outnumber cores.

    4 ranks on 2 cores      rank 0 [compute][looks.][compute][looks.]      as stages of a pipeline do: as many as there are cores
                            rank 1 [compute][looks.][compute][looks.]      compute, while the others look for their messages
                            rank 2 [looks.][compute][looks.][compute]
                            rank 3 [looks.][compute][looks.][compute]

A rank that waits gives its core away each time it looks, and takes 3 % of it. But it never sleeps, so a scheduler counts it as
one that runs and leaves ranks where they are: two that compute may share a core while two that look have the other. On two cores
(Linux 6.18, a quiet machine) a window takes 1.05 or 1.95 times its processor time, as it happens, and so do runs: of eight with
two pipelines of two stages five took 38 to 40 ms a step and three 46 to 53. What is measured is the mean speed over such windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpitrain.bench.calibrate_busy import block, together
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress

WORK = 0.005                      # processor seconds between two messages, as a micro-batch's on a stage
ROUNDS = 30                       # turns of all ranks, one after the other
WINDOWS = 12                      # so often: ranks that have slept are put on other cores


def waiting_share(world: World, cores: int) -> float:
    """The part of a working rank's share of the cores that a waiting one takes: of n ranks, those that compute, as many as
    `cores`, take (cores + share (n - cores)) / cores times their processor time. Collective."""
    link, run = Link(world.comm.Dup(), "calibrate", Progress()), block()
    run()
    spent = time.thread_time()
    run()
    calls = np.array([max(1, round(WORK / (time.thread_time() - spent)))])
    world.comm.Bcast(calls)

    def work() -> float:
        began = time.thread_time()
        for _ in range(int(calls[0])):
            run()
        return time.thread_time() - began
    seconds = np.array([window(world, link, cores, work) for _ in range(WINDOWS)])
    link.close()
    everyone = np.zeros((world.size, *seconds.shape))
    world.comm.Allgather(seconds, everyone)
    elapsed, computed = everyone[..., 0].max(0), everyone[..., 1].sum(0) / cores
    speed = float(np.mean(computed / elapsed))
    return min(1.0, max(0.0, (1 / speed - 1) * cores / (world.size - cores)))


def window(world: World, link: Link, cores: int, work: Callable[[], float]) -> tuple[float, float]:
    """(seconds until the last round, processor seconds of this rank's work) of rounds in which ranks take turns. Collective."""
    note, spent = np.zeros(8, np.uint8), 0.0

    def at_work(number: int) -> list[int]:
        return [(number * cores + place) % world.size for place in range(cores)] if 0 <= number < ROUNDS else []
    together(world)
    began = time.perf_counter()
    for number in range(ROUNDS):
        if world.rank not in at_work(number):
            continue
        for peer in at_work(number - 1):
            if peer != world.rank:
                link.receive(note.shape, note.dtype, peer, number, "a turn").wait()
        spent += work()
        for peer in at_work(number + 1):
            if peer != world.rank:
                link.send(note, peer, number + 1, "a turn")
    link.finish()
    return time.perf_counter() - began, spent
