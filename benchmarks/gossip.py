"""Rounds of gossip beside a ring all-reduce of the same parameters: milliseconds, bytes sent, and how far workers are apart.

    mpirun -n 8 python benchmarks/gossip.py rounds [--parameters 61706]
    python benchmarks/two_hosts.py --rate 100mbit --ranks 8 benchmarks/gossip.py rounds

Both sides get the same values, in turns, as often; the time is that of the slowest rank, and a round's result is checked against
the product with the graph's matrix in float64. Nothing is computed meanwhile: a training step hides a round of gossip behind all
of its forward and backward, and the sums of gradients behind backward alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.levels.gossip import Gossip
from mpitrain.schedules import graphs
from mpitrain.schedules.graph_check import check_graph, matrix

GRAPHS = ("ring", "torus", "matching", "one_peer_exponential", "exponential", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rounds"])
    parser.add_argument("--parameters", type=int, default=61_706, help="as LeNet has them")
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    rounds(arguments.parameters, arguments.rounds)


def rounds(count: int, repeats: int) -> None:
    """A line for each graph, on rank 0."""
    world = start()
    rank, n = world.rank, world.size
    ring = Channel(world.comm.Dup(), "ring", algorithm="ring")
    for name in GRAPHS:
        method = "push-sum" if name == "random" else "d-psgd"
        made = Gossip(ring, check_graph(getattr(graphs, name), n, method=method, name=name), count, "float32")
        values = np.random.default_rng(rank).normal(size=count).astype(np.float32)
        expected, weights = everyone(ring, values), np.ones(n)
        theirs, took, sent = values.copy(), [], []
        summed = ring.prepare(theirs, "ring")
        baseline = []
        for index in range(repeats):
            w = matrix(made.graph.edges(index), n)
            expected, weights = w @ expected, w @ weights
            took.append(slowest(ring, partial(once, made, values)))
            sent.append(made.most_bytes)
            theirs[...] = values
            baseline.append(slowest(ring, summed.run))
        error = np.abs(values - (expected / weights[:, None])[rank]).max()
        others = everyone(ring, values)
        drift = np.sqrt(((others - others.mean(0)) ** 2).sum() / n / (others.mean(0) ** 2).sum())
        assert error < 1e-5, error
        if rank == 0:
            print(json.dumps({"graph": str(made.graph), "round_ms": milliseconds(took),
                              "ring_all_reduce_ms": milliseconds(baseline),
                              "ratio": round(statistics.mean(took) / statistics.mean(baseline), 3),
                              "sent_kib": round(statistics.mean(sent) / 1024), "drift_after": float(f"{drift:.2g}")}), flush=True)
    ring.close()


def once(made: Gossip, values: np.ndarray) -> None:
    made.outgoing[...] = values
    made.start()
    values[...] = made.finish()


def slowest(channel: Channel, work: Callable[[], None]) -> float:
    """Seconds until all ranks have done it, who begin together."""
    channel.barrier()
    began = time.perf_counter()
    work()
    took = np.zeros(channel.size)
    took[channel.rank] = time.perf_counter() - began
    channel.allreduce(took, name="seconds")
    return float(took.max())


def everyone(channel: Channel, values: np.ndarray) -> np.ndarray:
    found = np.zeros((channel.size, values.size))
    found[channel.rank] = values
    channel.allreduce(found.reshape(-1), name="everyone")
    return found


def milliseconds(seconds: list[float]) -> list[float]:
    """Mean, median and best."""
    return [round(1e3 * found, 2) for found in (statistics.mean(seconds), statistics.median(seconds), min(seconds))]


if __name__ == "__main__":
    main()
