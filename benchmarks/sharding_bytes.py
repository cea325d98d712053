"""Bytes of a rank for parameters, gradients and optimizer state: for each comm.sharding, also with one copy per node, by formula.

    python benchmarks/sharding_bytes.py [--ranks 2 4 8] [--width 256] [--layers 4] [--json FILE]

Starts one job for each number of ranks. Each puts runs of a gpt with AdamW together, takes two steps, and asks every rank what
its arrays take; the rank that keeps most counts. "besides" is what the memory pool of that rank's NumPy arrays gave out for the
run besides those: buckets on their way, blocks that are put together, samples, activations. (With memory that ranks share,
gradients are not of that pool; so these runs send messages.) With comm.node_shared, "node" in the table, all ranks are on one
node, a rank's share of its copy counts, and nothing is said of what is besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np
from accuracy import ROOT, ROOT_MAY

from mpitrain import data, models, nn, optim
from mpitrain.backend import keep_freed_memory
from mpitrain.backend.memory import pool_in_use
from mpitrain.bench.report import Report, machine
from mpitrain.bench.train import Memory
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import STATES, CommConfig, Config, TrainConfig
from mpitrain.placement.bytes import predicted
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs

BLOCK, VOCABULARY, MOST = 16, 1000, 0.02     # of what the formula says, a rank may take more


def train(world, kind: str, node_shared: bool, width: int, layers: int) -> tuple[list[int], int, int]:
    """(bytes of parameters, gradients and optimizer state, bytes from the pool, number of parameters)."""
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (2 * world.size, BLOCK + 1))
    inputs = Inputs(Memory(rows[:, :-1], rows[:, 1:], "tokens"), range(len(rows)), None, range(0), data.Transforms())
    gc.collect()                             # the run before is a circle of objects
    pool = pool_in_use()
    before = pool.usage().used if pool else 0
    mesh = Mesh(world.comm)
    model = models.gpt(layers=layers, heads=4, width=width, block=BLOCK, vocabulary=VOCABULARY)
    model.recompute = True
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=lambda s: optim.AdamW(s, lr=1e-3),
                   quiet=True, config=Config(
                       train=TrainConfig(steps=2, batch_size=world.size),
                       comm=CommConfig(sharding=kind, node_shared=node_shared, algorithm="auto" if node_shared else "direct")))
    job.fit()
    measured = list(job.trainer.update.measured())
    used = (pool.usage().used if pool else 0) - before
    mesh.close()
    return measured, used, model.count_parameters()


def inside(width: int, layers: int) -> int:
    """What each rank of a job does; rank 0 prints a JSON line for each kind."""
    keep_freed_memory()
    world = start()
    channel = Channel(world.comm.Dup(), "bench")
    about = machine(channel)
    for node_shared, kind in product((False, True), STATES):
        measured, used, count = train(world, kind, node_shared, width, layers)
        everyone = channel.gather_objects([measured, used])
        most, pool = max(everyone, key=lambda found: sum(found[0]))
        if world.rank == 0:
            formula = predicted(count, kind, world.size, per_node=world.size if node_shared else 1)
            print(json.dumps({"kind": kind, "node_shared": node_shared, "ranks": world.size, "parameters": count,
                              "measured": most, "pool_bytes": None if node_shared else pool, "predicted": formula,
                              "machine": about}), flush=True)
    return 0


def job(ranks: int, width: int, layers: int) -> list[dict]:
    """The records of `inside` on `ranks` ranks of this machine."""
    beside = Path(sys.executable).with_name("mpirun")
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    paths = os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))
    out = subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(ranks), sys.executable, __file__, "--inside",
                          "--width", str(width), "--layers", str(layers)], check=True, stdout=subprocess.PIPE, text=True,
                         env={**scrubbed, **ROOT_MAY, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.width, options.layers)
    report, worst = Report(0, options.json), 0.0
    heads = "".join(f"{head:>12}" for head in ("parameters", "gradients", "optimizer", "formula"))
    report.line(f'{"ranks":>5}  {"comm.sharding":<18}{heads}{"ratio":>8}{"besides":>15}  (MiB of a rank)')
    for ranks in options.ranks:
        for record in job(ranks, options.width, options.layers):
            measured, formula = record["measured"], sum(record["predicted"])
            ratio = sum(measured) / formula
            worst = max(worst, abs(ratio - 1))
            report.record({"bench": "sharding_bytes", **record, "ratio": ratio})
            name = record["kind"] + (", node" if record["node_shared"] else "")
            besides = "" if record["node_shared"] else f'{(record["pool_bytes"] - sum(measured)) / 2**20:>+15.2f}'
            report.line(f"{ranks:>5}  {name:<18}" + "".join(f"{n / 2**20:>12.2f}" for n in [*measured, formula])
                        + f"{ratio:>8.4f}{besides}")
    report.line(f"at most {100 * worst:.2f} % from the formula (limit {100 * MOST:.0f} %)")
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    Process().run(main)
