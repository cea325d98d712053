"""What a long sequence costs where ranks share its positions (mesh.cp): bytes of each rank, and seconds a step, against one rank.

    python benchmarks/long_sequences.py [--length 4096] [--width 128] [--layers 4] [--ranks 1 2 4] [--json FILE]

Bytes are those of the arrays in use at their peak, in a training step of one sample, less those before it: activations, and what
travels between ranks, and no page that the system or a library keeps. The second table gives each rank as many positions
as one rank had of the first: what ranks have must stay, while the sequence grows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np
from largest_model import launched

from mpitrain import data, models, nn, optim
from mpitrain.backend import keep_freed_memory
from mpitrain.backend.memory import pool_in_use
from mpitrain.bench.report import Report, machine
from mpitrain.bench.train import Memory
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import CommConfig, Config, TrainConfig
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs

VOCABULARY, HEADS, STEPS = 256, 4, 3


def inside(length: int, width: int, layers: int) -> int:
    """What each rank of a job does; rank 0 prints a JSON line."""
    keep_freed_memory()
    world = start()
    channel = Channel(world.comm.Dup(), "bench")
    about = machine(channel)
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS + 1, length + 1))
    inputs = Inputs(Memory(rows[:, :-1], rows[:, 1:], "tokens"), range(len(rows)), None, range(0), data.Transforms())
    model = models.gpt(layers=layers, heads=HEADS, width=width, block=length, vocabulary=VOCABULARY)
    mesh = Mesh(world.comm, cp=world.size)
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=lambda s: optim.AdamW(s, lr=1e-4),
                   config=Config(train=TrainConfig(steps=STEPS, batch_size=1), comm=CommConfig(bucket_mb=2)), quiet=True)
    pool = pool_in_use()
    if pool is None:
        raise SystemExit("arrays are counted by the pool of native/memory.c, which needs a C compiler; install one")
    before = pool.usage().used
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        job.trainer.train_step(job.trainer.loader.load(step))
        seconds.append(time.perf_counter() - began)
    grown = channel.gather_objects(pool.usage().peak - before)
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "length": length, "width": width, "layers": layers, "grown_bytes": max(grown),
                          "seconds": min(seconds), "cores": os.cpu_count(), "machine": about}), flush=True)
    mesh.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.length, options.width, options.layers)
    report = Report(0, options.json)

    def line(ranks: int, length: int) -> dict:
        found = launched(__file__, ranks, "--inside", "--length", str(length), "--width", str(options.width),
                         "--layers", str(options.layers))
        report.record({"bench": "long_sequences", **found})
        report.line(f'{ranks:>3} ranks {length:>7} positions {found["grown_bytes"] / 2**20:>8.1f} MiB a rank '
                    f'{found["seconds"]:>8.2f} s a step')
        return found

    report.line(f"one sample, {options.layers} blocks of width {options.width}; the same length on more ranks")
    same = {ranks: line(ranks, options.length) for ranks in options.ranks}
    first = same[options.ranks[0]]
    for ranks, found in same.items():
        report.line(f'  {ranks} ranks: {first["grown_bytes"] / found["grown_bytes"]:.2f} times fewer bytes, '
                    f'{first["seconds"] / found["seconds"]:.2f} times faster than {options.ranks[0]}')
    report.line("as many positions on each rank")
    for ranks in options.ranks:
        line(ranks, options.length // options.ranks[-1] * ranks)
    return 0


if __name__ == "__main__":
    Process().run(main)
