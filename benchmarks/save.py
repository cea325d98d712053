"""Checkpoints written while training goes on, beside those that training waits for, of 10 million parameters with AdamW.

    python benchmarks/save.py [--pairs 10] [--json FILE]
    mpirun -n 2 python benchmarks/save.py --bound             each rank on a core of its own, so that none is idle

One run saves in both ways in turn, so that each pair meets the same machine and disk. Two ratios come of a pair:

    stood still    seconds of training lost to the asynchronous save / to the blocking one (bar: 0.10)
    step           mean step while the thread of rank 0 writes / mean step in the same interval when it has finished (bar: 1.05)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import pinned  # first: it sets what NumPy reads

# isort: split
import numpy as np

from mpitrain import data, models, nn, optim
from mpitrain.backend import keep_freed_memory
from mpitrain.bench.pairs import quartiles
from mpitrain.bench.report import Report, machine
from mpitrain.bench.train import Memory
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.comm.job.together import on_first
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config, changed
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.observers import Observer

ROWS, WIDTHS = 128, (784, 2048, 2048, 2048, 10)
WARM_UP = 2                      # saves that are not counted: the first touches new memory and imports h5py


class Turns(Observer):
    """Saves in both ways in turn, and keeps the times of the steps between."""

    def __init__(self, saver):
        self.saver, self.writing, self.idle, self.busy = saver, [], [], False

    def before_checkpoint(self, step):
        self.saver.asynchronous = not self.saver.asynchronous
        self.writing.append([])
        self.idle.append([])

    def before_step(self, step):
        self.busy = not self.saver.ready

    def after_step(self, step, fields, seconds):
        if self.writing and self.busy and not self.saver.ready:
            self.writing[-1].append(seconds)
        elif self.idle and not self.busy and not self.saver.busy:
            self.idle[-1].append(seconds)


def job_of(mesh, steps, every):
    rng = np.random.default_rng(0)
    source = Memory(rng.standard_normal((4 * ROWS, WIDTHS[0]), np.float32), rng.integers(0, WIDTHS[-1], 4 * ROWS))
    inputs = Inputs(source, range(4 * ROWS), None, range(0), data.Transforms())
    config = changed(Config(), train={"steps": steps, "batch_size": ROWS}, checkpoint={"every": every, "best": False},
                     log={"every": 10**9})
    return assemble(models.mlp(WIDTHS[0], list(WIDTHS[1:-1]), WIDTHS[-1]), inputs, mesh, config=config, quiet=True,
                    loss=nn.LOSSES["cross_entropy"](), optimizer=lambda storage: optim.OPTIMIZERS["adamw"](storage, lr=1e-4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints; writing must end well before the next")
    parser.add_argument("--bound", action="store_true", help="bind each rank to a core of its own")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a new folder in the present one)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    mesh = Mesh(start().comm)
    job = job_of(mesh, options.every * (2 * (options.pairs + WARM_UP) + 1), options.every)
    report = Report(job.channel.rank, options.json)
    if options.bound:
        pinned.keep_to_one_core(job.channel)
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as name:
        folder = RunFolder(Path(on_first(job.channel, lambda: name)) / "run")
        on_first(job.channel, lambda: folder.open() and None)
        job.keep_in(folder, {})
        turns = Turns(job.trainer.saver)
        job.trainer.observers.append(turns)
        job.fit()
        about = machine(job.channel)
        folder.close()
    if job.channel.rank == 0:                                     # it writes, and has the figures
        tell(report, job.trainer.saver.all[2 * WARM_UP:], turns, about, job.channel.size)
    mesh.close()
    return 0


def tell(report, saved, turns, about, ranks):
    blocking, asynchronous = saved[:-1:2], saved[1:-1:2]          # the first one turned True to False; the last is the run's
    slower = [statistics.mean(writing) / statistics.mean(idle) for writing, idle in zip(turns.writing, turns.idle)
              if len(writing) > 1 and len(idle) > 1][WARM_UP:]
    still = [a.still_s / b.still_s for a, b in zip(asynchronous, blocking)]
    report.line(f"{saved[0].nbytes / 1e6:.0f} MB, {ranks} rank(s); medians (quartiles) of {len(still)} pairs")
    figures = {"blocking_s": [b.still_s for b in blocking], "asynchronous_still_s": [a.still_s for a in asynchronous],
               "asynchronous_write_s": [a.seconds for a in asynchronous], "still_ratio": still, "step_ratio": slower}
    for name, values in figures.items():
        if not values:
            raise SystemExit("writing took up all steps between two checkpoints; give a larger --every")
        low, high = quartiles(values)
        report.line(f"{name:<24}{statistics.median(values):8.4f}  ({low:.4f} to {high:.4f})")
    report.record({"bench": "save", "ranks": ranks, "pairs": len(still), "nbytes": saved[0].nbytes, "machine": about,
                   **{name: statistics.median(values) for name, values in figures.items()}})


if __name__ == "__main__":
    Process().run(main)
