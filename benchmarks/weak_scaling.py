"""Weak scaling of a training step: each rank has the same work whether it trains alone or with the others.

    mpirun -n 2 python benchmarks/weak_scaling.py [--models mlp,gpt] [--node-shared] [--json FILE]

mlp: 784-1024-1024-10, 128 rows a rank; gpt: nanoGPT's CPU settings (4 layers, 4 heads, width 128, block 64), 12 sequences a rank.
A step is the trainer's own: forward, loss, backward with buckets leaving, AdamW, mean loss. Every rank keeps to one core.
In one job, turns alternate: all ranks train together, then one of them alone (each in its turn) while the others sleep. The
efficiency is the time alone over the time together, median of pairs: 1 means that more ranks cost nothing.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import pinned  # first: it sets what NumPy reads

# isort: split
import numpy as np

from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.pairs import Clock, alternate
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import WORKLOADS
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import UsageError

NAP = 0.001                      # seconds between the looks of a sleeping rank at its messages


MODELS = {"mlp": "mlp", "gpt": "gpt-nano"}                     # our names of workloads


def training(name, comm, node_shared=False):
    """One model on the ranks of a communicator, as `mpitrain train` puts it together."""
    return Training(WORKLOADS[MODELS[name]], comm, sections={"comm": {"node_shared": node_shared}})


class Together:
    """Turns in which all ranks train one model, each on its own rows."""

    def __init__(self, name, world, steps, node_shared):
        self.all, self.clock, self.steps = training(name, world.comm, node_shared), Clock(world), steps

    def turn(self, _):
        """Seconds of a step of the slowest rank."""
        return self.clock.time(partial(self.all.run, self.steps)) / self.steps


class Alone:
    """Turns in which one rank trains by itself; the others sleep, so that it has the machine's memory and caches."""

    def __init__(self, name, world, steps):
        self.own = training(name, world.comm.Split(world.rank))
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
    pinned.keep_to_one_core(channel)
    about = machine(channel)
    report.line(f"weak scaling, 1 to {world.size} ranks of one core; medians of {options.pairs} pairs of {options.steps} steps\n"
                f"{'model':<10}{'alone':>11}{'together':>11}   alone / together")
    for name in names:
        together, alone = Together(name, world, options.steps, options.node_shared), Alone(name, world, options.steps)
        result = alternate(together.turn, alone.turn, options.pairs).summary("alone")
        together.all.check(name)
        report.record({"bench": "weak_scaling", "model": name, "ranks": world.size, **result, "steps": options.steps,
                       "node_shared": options.node_shared, "machine": about})
        report.line(f"{name:<10}{in_time(result['alone_seconds']):>11}{in_time(result['seconds']):>11}   {ratio_of(result)}")
        together.all.close()
        alone.own.close()
    return 0


if __name__ == "__main__":
    Process().run(main)
