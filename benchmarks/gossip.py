"""Gossip beside a ring all-reduce: rounds in milliseconds, and what LeNet learns.

    mpirun -n 8 python benchmarks/gossip.py rounds [--parameters 61706]
    python benchmarks/two_hosts.py --rate 100mbit --ranks 8 benchmarks/gossip.py rounds
    python benchmarks/two_hosts.py --rate 100mbit --ranks 8 benchmarks/gossip.py steps --data IMPORTED --out FOLDER
    python benchmarks/gossip.py accuracy --data FOLDER [--seeds 3]

`accuracy` trains LeNet on the 8,000 first digits of MNIST's test file (IDX files in FOLDER) and validates on the other 2,000,
on 8 ranks: once with gradients summed by a ring, then by gossip over each graph, with the same seeds, rows and learning rates.
The bar is 0.5 points below the all-reduce, in the mean over seeds.

`steps` trains LeNet for 60 steps by each exchange, on data that `mpitrain data import idx` has written; milliseconds of a step
are the mean, median and best of the last 5 tens. The bar is 0.6 of the time by the ring's all-reduce, where the link is slow.

In `rounds` both sides get the same values, in turns, as often; the time is that of the slowest rank, and a round's result is
checked against the product with the graph's matrix in float64. Nothing is computed meanwhile: a training step hides a round of
gossip behind all of its forward and backward, and the sums of gradients behind backward alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from mpitrain import Process, Run, load_config
from mpitrain.comm.job.start import launched_rank, start
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.levels.gossip import Gossip
from mpitrain.run.session import before_mpi, look_at_files
from mpitrain.schedules import graphs
from mpitrain.schedules.graph_check import check_graph, matrix

ROOT = Path(__file__).resolve().parents[1]
LENET = """
[model]
name = "lenet"
classes = 10
[data]
path = "mnist"
transform = ["scale"]
validation = "tail:0.2"
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.9
schedule = "cosine"
[train]
batch_size = 64
[log]
every = 20
progress_s = 0
"""
GRAPHS = ("ring", "torus", "matching", "one_peer_exponential", "exponential", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rounds", "steps", "accuracy"])
    parser.add_argument("--parameters", type=int, default=61_706, help="as LeNet has them")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--data", type=Path, help="a folder with MNIST's IDX files, or for steps the imported data")
    parser.add_argument("--out", type=Path, help="a folder for the runs of steps")
    parser.add_argument("--batch-size", type=int, default=64, help="of steps, all ranks together")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--graph", action="append", help="again for another; by default three")
    arguments = parser.parse_args()
    if arguments.what == "rounds":
        rounds(arguments.parameters, arguments.rounds)
    elif arguments.what == "steps":
        process = Process()
        process.run(partial(steps, arguments, process))
    else:
        accuracy(arguments)


def accuracy(arguments: argparse.Namespace) -> None:
    """A line for each graph: accuracy of all seeds, their mean, and points below the all-reduce."""
    sys.path.insert(0, str(ROOT / "tests"))
    from launch import mpirun
    with tempfile.TemporaryDirectory() as folder:
        imported = mpirun(1, "-m", "mpitrain", "data", "import", "idx", arguments.data.resolve(), "--out", "mnist", cwd=folder)
        assert imported.rc == 0, imported.err
        (Path(folder) / "run.toml").write_text(LENET)
        dense = 0.0
        for name in ("all-reduce", *(arguments.graph or ["one_peer_exponential", "ring", "matching"])):
            method = "push-sum" if name == "random" else "d-psgd"
            level = ['comm.algorithm="ring"'] if name == "all-reduce" else [
                f"mesh.site={arguments.ranks}", f'sync.levels=[{{graph="{name}", method="{method}"}}]']
            found, seconds = [], []
            for seed in range(arguments.seeds):
                out = Path(folder) / f"{name}-{seed}"
                ended = mpirun(arguments.ranks, "-m", "mpitrain", "train", "run.toml", f"run.out={out}", f"run.seed={seed}",
                               f"train.epochs={arguments.epochs}", *level, cwd=folder, timeout=3600)
                assert ended.rc == 0, ended.err
                lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
                found.append(100 * next(line["accuracy"] for line in reversed(lines) if "accuracy" in line))
                seconds.append(statistics.median(line["step_s"] for line in lines if "step_s" in line))
            dense = statistics.mean(found) if name == "all-reduce" else dense
            print(json.dumps({"exchange": name, "accuracy": [round(one, 2) for one in found],
                              "mean": round(statistics.mean(found), 3), "points_below": round(dense - statistics.mean(found), 3),
                              "step_ms": [round(1e3 * one, 1) for one in seconds]}), flush=True)


def steps(arguments: argparse.Namespace, process: Process) -> int:
    """A line for each exchange, on rank 0: mean milliseconds of a step, and their share of the ring's."""
    out, ways = arguments.out.resolve(), {
        "ring": ['comm.algorithm="ring"'], "hierarchical": ['comm.algorithm="hierarchical"'],
        **{f"gossip, {graph}": ["mesh.site=0", f'sync.levels=[{{graph="{graph}"}}]']
           for graph in arguments.graph or ("matching", "one_peer_exponential", "ring")},
        "gossip of 2 sites": ["mesh.site=2", 'sync.levels=[{graph="ring"}]', 'comm.sharding="optimizer"']}
    source = out / "run.toml"
    asked = []
    if launched_rank()[0] == 0:
        out.mkdir(parents=True, exist_ok=True)
        text = LENET.replace('path = "mnist"', f'path = "{arguments.data.resolve()}"').replace("every = 20", "every = 10")
        source.write_text(text)
    while not source.exists():
        time.sleep(0.01)
    for number, keys in enumerate(ways.values()):
        keys = [f"mesh.site={arguments.ranks}" if key == "mesh.site=0" else key for key in keys]
        config = load_config(source, [f"run.out={out / str(number)}", "train.steps=60",
                                      f"train.batch_size={arguments.batch_size}", *keys])
        asked.append((config, before_mpi(partial(look_at_files, config))))
    world, first = start(), 0.0
    for name, (config, files) in zip(ways, asked):
        with Run(config, world.comm.Dup(), process=process, quiet=True, files=files) as run:
            run.train(overwrite=True)
        if world.rank == 0:
            lines = [json.loads(line) for line in (Path(config.run.out) / "metrics.jsonl").read_text().splitlines()]
            took = [line["step_s"] for line in lines if "step_s" in line][2:]     # The first is of one step, by itself.
            first = first or statistics.mean(took)
            print(json.dumps({"exchange": name, "step_ms": milliseconds(took), "ratio": round(statistics.mean(took) / first, 3)}),
                  flush=True)
    return 0


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
            took.append(slowest(ring, partial(once, made, values, sent)))
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
                              "sent_kib_by_rank_0": round(statistics.mean(sent) / 1024),
                              "drift_after": float(f"{drift:.2g}")}), flush=True)
    ring.close()


def once(made: Gossip, values: np.ndarray, sent: list[int]) -> None:
    made.outgoing[...] = values
    sent.append(made.start())
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
