"""Weak scaling of a training step: each rank has the same work whether it trains alone or with the others.

    mpirun -n 2 python benchmarks/weak_scaling.py [--models mlp,gpt] [--node-shared] [--json FILE]

mlp: 784-1024-1024-10, 128 rows a rank; gpt: nanoGPT's CPU settings (4 layers, 4 heads, width 128, block 64), 12 sequences a rank.
A step is the trainer's own: forward, loss, backward with buckets leaving, AdamW, mean loss. Every rank keeps to one core.
In one job, turns alternate: all ranks train together, then one of them alone (each in its turn) while the others sleep. The
efficiency is the time alone over the time together, median of pairs: 1 means that more ranks cost nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np

from mpitrain import models, nn, optim
from mpitrain.backend import CPU, keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.pairs import Clock, alternate
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.comm.channel import Channel
from mpitrain.comm.guard import run_guarded, symmetric
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.start import start
from mpitrain.data.loader import MicroBatch
from mpitrain.errors import UsageError
from mpitrain.parallel.exchange import Exchange
from mpitrain.parallel.feed import Feed
from mpitrain.parallel.pipeline import Pipeline
from mpitrain.parallel.replicas import checksum
from mpitrain.parallel.statistics import PlainStatistics
from mpitrain.parallel.tuning import Tuning
from mpitrain.train.trainer import Trainer

NAP = 0.001                      # seconds between the looks of a sleeping rank at its messages
BATCHES = 4                      # different ones, used in turn


def mlp(rng):
    """(model, makes a batch of one rank, whether inputs are tokens)."""
    return (models.mlp(784, [1024, 1024], 10),
            lambda: (rng.standard_normal((128, 784), dtype=np.float32), rng.integers(0, 10, 128)), False)


def gpt(rng):
    return (models.gpt(layers=4, heads=4, width=128, block=64, vocabulary=65),
            lambda: (rng.integers(0, 65, (12, 64)), rng.integers(0, 65, (12, 64))), True)


MODELS = {"mlp": mlp, "gpt": gpt}


class Training:
    """One model on the ranks of a communicator, as `mpitrain train` puts it together, on batches that stay in memory."""

    def __init__(self, name, comm, node_shared=False):
        self.mesh = Mesh(comm)
        control, exchange = self.mesh.channel(self.mesh.axes, "control"), Exchange(self.mesh, node_shared=node_shared)
        model, batch, tokens = MODELS[name](np.random.default_rng(comm.rank))
        self.storage = model.initialize(seed=0, allocate=exchange.allocate)
        optimizer = optim.AdamW(self.storage, lr=1e-3, weight_decay=0.01)
        reducer = exchange.reducer(self.storage, optimizer, bucket_bytes=4 << 20, tree=None)
        loss = nn.LOSSES["cross_entropy"]()
        pipeline = Pipeline(model, loss, control, reducer, Feed(CPU, "float32", tokens=tokens),
                            n_micro=self.mesh.size("dp"))
        update = exchange.update(model, optimizer, reducer, control, lambda step: 1e-3, clip_norm=0.0,
                                 statistics=PlainStatistics(model, control))
        update.want_norm = False                               # as between two lines of the log
        self.trainer = Trainer(pipeline=pipeline, update=update, loader=None, evaluator=None, channel=control, plan=None,
                               recorder=None, tuning=Tuning(reducer, control))
        self.batches = [batch() for _ in range(BATCHES)]
        self.channel = control

    def run(self, steps):
        for _ in range(steps):
            step = self.trainer.update.step
            x, y = self.batches[step % BATCHES]
            first = self.channel.rank * len(x)
            micro = MicroBatch(x, y, np.arange(first, first + len(x)), self.channel.rank, first, step)
            self.trainer.train_step([micro])


class Together:
    """Turns in which all ranks train one model, each on its own rows."""

    def __init__(self, name, world, steps, node_shared):
        self.all, self.clock, self.steps = Training(name, world.comm, node_shared), Clock(world), steps

    def turn(self, _):
        """Seconds of a step of the slowest rank."""
        return self.clock.time(partial(self.all.run, self.steps)) / self.steps


class Alone:
    """Turns in which one rank trains by itself; the others sleep, so that it has the machine's memory and caches."""

    def __init__(self, name, world, steps):
        self.own = Training(name, world.comm.Split(world.rank))
        self.comm, self.rank, self.size, self.steps = world.comm.Dup(), world.rank, world.size, steps

    def turn(self, number):
        """Seconds of a step, the same number on every rank."""
        who, seconds = number // 2 % self.size, np.zeros(1)
        self.comm.Barrier()
        if self.rank == who:
            began = time.perf_counter()
            self.own.run(self.steps)
            seconds[0] = (time.perf_counter() - began) / self.steps
            for other in range(self.size):
                if other != who:
                    self.comm.Send(seconds, other)
        else:
            while not self.comm.Iprobe(who):
                time.sleep(NAP)
            self.comm.Recv(seconds, who)
        return float(seconds[0])


def keep_to_one_core(channel) -> None:
    """Binds this rank to a core of its own, unless its launcher has; refuses to share one."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[channel.rank % len(allowed)]})
    taken = channel.gather_objects(sorted(os.sched_getaffinity(0)))
    if len({core for cores in taken for core in cores}) < channel.size:
        raise SystemExit(f"{channel.size} ranks on cores {taken}: each needs its own; use fewer ranks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="in a turn: few, as a shared machine changes its speed")
    parser.add_argument("--node-shared", action="store_true", help="as comm.node_shared = true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with symmetric():
        names = arguments.words(options.models, "--models")
        if not set(names) <= set(MODELS):
            raise UsageError(f"--models takes {', '.join(MODELS)}, found {options.models}")
        arguments.at_least(options.pairs, 1, "--pairs")
        arguments.at_least(options.steps, 1, "--steps")
    keep_freed_memory()
    world = start()
    if world.size == 1:
        raise SystemExit("one rank has nobody to train with; start it with mpirun -n 2")
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, options.json)
    keep_to_one_core(channel)
    about = machine(channel)
    report.line(f"weak scaling, 1 to {world.size} ranks of one core; medians of {options.pairs} pairs of {options.steps} steps\n"
                f"{'model':<10}{'alone':>11}{'together':>11}   alone / together")
    for name in names:
        together, alone = Together(name, world, options.steps, options.node_shared), Alone(name, world, options.steps)
        result = alternate(together.turn, alone.turn, options.pairs).summary("alone")
        channel.agree(checksum({"values": together.all.storage.values}), "the parameters after training together")
        report.record({"bench": "weak_scaling", "model": name, "ranks": world.size, **result, "steps": options.steps,
                       "node_shared": options.node_shared, "machine": about})
        report.line(f"{name:<10}{in_time(result['alone_seconds']):>11}{in_time(result['seconds']):>11}   {ratio_of(result)}")
        together.all.mesh.close()
        alone.own.mesh.close()
    return 0


if __name__ == "__main__":
    run_guarded(main)
