"""A training step of well-known models, as `mpitrain train` puts it together, on batches that stay in memory.

    build, a few steps to warm up | barrier  [step]  slowest rank's time | barrier [step] ... | check the losses

Each rank has the whole batch that is usual for the model, so `flops`, `peak_fraction` and the work of a rank do not depend on the
number of ranks. The same few batches come again and again: what is learned is noise, and it must be learned, by all ranks alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain import data, nn, optim
from mpitrain.backend import float_dtype, select_device
from mpitrain.backend.memory import forget_peak, page_faults, resident
from mpitrain.bench.pairs import Clock, quartiles
from mpitrain.bench.peak import peak_flops
from mpitrain.bench.report import Report, in_time, machine
from mpitrain.bench.workloads import WORKLOADS, Workload
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import Config, TrainConfig, changed
from mpitrain.errors import MpitrainError, NumericsError
from mpitrain.parallel.gradients.replicas import checksum
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.model import keep_inputs_only
from mpitrain.train.build.precision import refuse

BATCHES = 2                       # So many different batches are used in turn.
WARM_UP = 2 * BATCHES             # The first steps do not count: first touches, compilation, connections, caches of plans.
LR, DECAY = 3e-4, 0.01
ROUNDS = 5                        # of steps on a GPU, each waited for once


class Memory:
    """Samples that lie in memory, as a source of training rows."""

    names = ("x", "y")

    def __init__(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], kind: str = "classes"):
        self.x, self.y, self.kind = x, y, kind

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self.x[rows], self.y[rows]

    def where(self, row: int) -> tuple[str, int]:
        return "memory", row


def made(workload: Workload, recompute: bool = False) -> nn.Module:
    """The model, whose blocks keep their inputs alone where `recompute` says so."""
    model = workload.make()
    if recompute:
        keep_inputs_only(model, True)
    return model


def adam(storage: Any) -> optim.Optimizer:
    return optim.AdamW(storage, lr=LR, weight_decay=DECAY)


class Training:
    """One workload on the ranks of `comm`, put together by `assemble`; all of them make it, step and close it alike. A
    data-parallel rank has the workload's batch; `sections` are keys of the configuration: ``{"train": {"micro_batches": 4}}``.

    `batches` are this rank's, as (x, y); `losses` are those of all steps so far, each the mean over all ranks' rows.
    """

    def __init__(self, workload: Workload, comm: Any, *, pp: int = 1, tp: int = 1, recompute: bool = False,
                 sections: Mapping[str, Mapping[str, Any]] | None = None):
        self._mesh = mesh = Mesh(comm, pp=pp, tp=tp)
        ranks = mesh.size("dp")
        source = Memory(*workload.samples(workload.batch * ranks * BATCHES, seed=0), "tokens" if workload.tokens else "classes")
        inputs = Inputs(source, range(len(source)), None, range(0), data.Transforms())
        self.config = changed(Config(train=TrainConfig(steps=1, batch_size=workload.batch * ranks)), **sections or {})
        self.sample = inputs.sample()
        self.job = assemble(made(workload, recompute), inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=adam,
                            config=self.config, quiet=True)
        self.model = self.job.state.model
        self.job.trainer.update.want_norm = False             # Steps between two lines of the log compute no norm.
        loader: Any = self.job.trainer.loader
        self._micro_batches = [loader.load(step) for step in range(BATCHES)]
        self.batches = [(micro.x, micro.y) for batch in self._micro_batches for micro in batch]
        self.losses: list[Any] = []                           # Of a device they may still be on their way.
        self.device = self.job.policy.layout.device

    def step(self) -> float:
        """The loss before the update."""
        self.launch()
        return float(self.losses[-1])

    def launch(self) -> None:
        """A step whose loss nobody waits for."""
        self.losses.append(self.job.trainer.train_step(self._micro_batches[len(self.losses) % BATCHES]).mean)

    def run(self, steps: int) -> None:
        """So many steps, of which a device is done with the last."""
        for _ in range(steps):
            self.launch()
        self.device.synchronize()

    def check(self, name: str) -> None:
        """Communicates. NumericsError where a loss is not finite, MpitrainError where training taught nothing, DesyncError
        where ranks differ: the times of such steps must not be used."""
        channel = self.job.channel
        self.losses = [float(loss) for loss in self.losses]
        channel.agree([loss.hex() for loss in self.losses], f"the losses of {name}")
        parameters = {key: parameter.master for key, parameter in self.model.named_parameters()}
        channel.agree(checksum(parameters), f"the parameters of {name}, trained {len(self.losses)} steps (a checksum)")
        wrong = [step for step, loss in enumerate(self.losses) if not math.isfinite(loss)]
        if wrong:
            raise NumericsError(f"bench train {name}: the loss is {self.losses[wrong[0]]}; its times must not be used",
                                step=wrong[0] + 1)
        first, last = self.first_and_last()
        if not last < first:
            raise MpitrainError(f"bench train {name}: the loss on the same batches was {first:.6g} at first and is {last:.6g} "
                                f"after {len(self.losses)} steps, where it should have fallen; its times must not be used")

    def first_and_last(self) -> tuple[float, float]:
        """Mean losses on all batches, when they came first and last."""
        losses = [float(loss) for loss in self.losses]
        return statistics.fmean(losses[:BATCHES]), statistics.fmean(losses[-BATCHES:])

    def close(self) -> None:
        reducer: Any = self.job.trainer.pipeline.reducer
        reducer.close()
        self._mesh.close()


def bench_train(channel: Channel, world: World, report: Report, *, models: Sequence[str], precisions: Sequence[str], steps: int,
                threads: int, device: str = "cpu") -> None:
    """One record for each model and precision; `threads` are those of BLAS in a rank. Collective; see `Training.check`."""
    if device == "gpu":
        bench_train_on_gpu(channel, world, report, models=models, precisions=precisions, steps=steps)
        return
    for precision in precisions:                              # A refusal comes before the head of a table that would stay empty.
        float_dtype(precision)
        refuse(precision)
    about = machine(channel)
    report.line(f"training steps on {world.size} rank{'s' * (world.size > 1)}, {threads} thread{'s' * (threads > 1)} each; "
                f"medians of {steps} steps, AdamW; flops of a rank\n"
                f"{'model':<10}{'precision':<10}{'step':>11}{'GFLOP/s':>9}{'of peak':>9}{'faults':>8}{'peak MiB':>10}   loss")
    for name in models:
        for precision in precisions:
            found = measure(name, WORKLOADS[name], precision, world, steps, threads)
            report.record({**found, "machine": about})
            report.line(f"{name:<10}{precision:<10}{in_time(found['seconds']):>11}"
                        f"{found['flops'] / found['seconds'] / 1e9:>9.1f}{found['peak_fraction']:>9.1%}"
                        f"{found['page_faults']:>8.1f}{found['peak_rss_mb']:>10.0f}"
                        f"   {found['first_loss']:.4f} -> {found['last_loss']:.4f}")


def measure(name: str, workload: Workload, precision: str, world: World, steps: int, threads: int) -> dict[str, Any]:
    """The record of one model; the same on every rank but for what ranks disagree in, where it is the worst of them.

    `seconds` is the median step of the slowest rank. `peak_fraction` holds flops a second against `threads` times what the
    slowest rank's core does in multiply-adds of float32 (a float64 run: of float64), measured before and after, the better one.
    `page_faults` are minor faults a step; `peak_rss_mb` is the whole process's while the model was there.
    """
    wide = "float64" if precision == "float64" else "float32"
    forget_peak()
    before = peak_flops(wide)
    with guard.symmetric():
        training = Training(workload, world.comm, sections={"train": {"precision": precision}})
    clock = Clock(world)
    training.run(WARM_UP)
    faults = page_faults()
    times = [clock.time(training.step) for _ in range(steps)]
    faults = page_faults() - faults
    peak = max(before, peak_flops(wide))
    training.check(name)
    worst = partial(extreme, training.job.channel)
    seconds, low_high, peak_flops_a_rank = statistics.median(times), quartiles(times), threads * -worst(-peak)
    first, last = training.first_and_last()
    found = {"bench": "train", "model": name, "precision": precision, "ranks": world.size, "threads": threads, "seconds": seconds,
             "flops": workload.flops, "peak_fraction": workload.flops / seconds / peak_flops_a_rank,
             "page_faults": worst(faults / steps), "peak_rss_mb": worst(resident(peak=True) / 2**20),
             "seconds_low": low_high[0], "seconds_high": low_high[1], "steps": steps, "batch": workload.batch,
             "parameters": training.model.count_parameters(), "peak_flops": peak_flops_a_rank,
             "first_loss": first, "last_loss": last}
    training.close()
    return found


def bench_train_on_gpu(channel: Channel, world: World, report: Report, *, models: Sequence[str], precisions: Sequence[str],
                       steps: int) -> None:
    """The same on the ranks' GPUs: `steps` steps are launched one after the other and waited for once, in rounds."""
    select_device("gpu")                                      # A refusal comes before the head of a table.
    about = machine(channel)
    report.line(f"training steps on {world.size} rank{'s' * (world.size > 1)}, a GPU each; medians of {ROUNDS} rounds of {steps} "
                f"steps, AdamW; flops of a rank\n{'model':<10}{'precision':<10}{'step':>11}{'samples/s':>12}{'TFLOP/s':>9}"
                "   loss")
    for name in models:
        for precision in precisions:
            workload = WORKLOADS[name]
            with guard.symmetric():
                training = Training(workload, world.comm, sections={"train": {"precision": precision, "device": "gpu"}})
            clock = Clock(world)
            training.run(WARM_UP)
            times = [clock.time(partial(training.run, steps)) / steps for _ in range(ROUNDS)]
            training.check(name)
            seconds, (low, high), (first, last) = statistics.median(times), quartiles(times), training.first_and_last()
            report.record({"bench": "train", "device": "gpu", "model": name, "precision": precision, "ranks": world.size,
                           "seconds": seconds, "seconds_low": low, "seconds_high": high, "steps": steps, "batch": workload.batch,
                           "flops": workload.flops, "parameters": training.model.count_parameters(), "first_loss": first,
                           "last_loss": last, "machine": about})
            report.line(f"{name:<10}{precision:<10}{in_time(seconds):>11}{workload.batch / seconds:>12.0f}"
                        f"{workload.flops / seconds / 1e12:>9.2f}   {first:.4f} -> {last:.4f}")
            training.close()


def extreme(channel: Channel, value: float) -> float:
    """The largest of the ranks' values."""
    return max(map(float, channel.gather_objects(float(value))))
