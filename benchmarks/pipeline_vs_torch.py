"""Training steps of a pipeline, beside torch.distributed.pipelining over gloo: the same model, cut and schedule.

    mpirun -n 2 python benchmarks/pipeline_vs_torch.py [--schedules 1f1b,gpipe] [--models lenet-3,8x64x16,8x256x256] [--json FILE]

Models are those of `mpitrain bench train` that are a sequence in PyTorch too, their batch of 128 cut into micro-batches, the
first stage with so many blocks: lenet-3 (the first convolution) is PyTorch's fastest cut, lenet-5 (both) is ours. Or stacks: one
is BLOCKSxWIDTHxROWS, equal blocks (layer norm, WIDTH to 4 WIDTH with GELU, back, plus the input), and the rows of a micro-batch.
A step is all forwards and backwards of the schedule and AdamW (PyTorch's: fused). Each process is a stage and keeps to a core of
its own, with one thread.

Both start from the same values and see the same batch. Losses must agree after every step, parameters at the end. The sides
alternate. Where a stage computes long, both wait for the same arithmetic, and no pipeline can be many times faster; small stacks
show what a schedule, its messages and the engine themselves cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pinned  # (first: it sets what NumPy and PyTorch read)

# isort: split
import numpy as np
import torch
from allreduce_vs_gloo import connect, disconnect
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch_side import MODELS, set_parameters

from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.pairs import Clock, alternate
from mpitrain.bench.pipeline import DECAY, LR, Contender, Stack, Task
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.bench.workloads import WORKLOADS
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import MpitrainError, UsageError

CUTS: dict[str, tuple[str, tuple[int, ...], int]] = {    # model, blocks of each stage of ours, where PyTorch's sequence is cut
    "lenet-3": ("lenet", (3, 6), 3), "lenet-5": ("lenet", (5, 4), 6), "mlp-2": ("mlp", (2, 2), 2)}
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
TOLERANCE = 1e-4                                 # relative, of losses after some steps in float32


class Block(nn.Module):
    """What `mpitrain.bench.pipeline.Block` is."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Pair(NamedTuple):
    """A model on both sides; `part(rank)` is the stage in PyTorch."""

    name: str
    task: Task
    part: Callable[[int], nn.Module]


def known(name: str) -> Pair:
    """A model of `mpitrain bench train`."""
    model, ours, theirs = CUTS[name]
    whole, workload = MODELS[model](), WORKLOADS[model]
    x, y = workload.samples(workload.batch, 0)
    bounds = (0, theirs, len(whole))
    return Pair(name, Task(workload.make, x, y, ours), lambda rank: whole[bounds[rank]:bounds[rank + 1]])


def stacked(name: str, n_stages: int, n_micro: int) -> Pair:
    """A stack, from what its name says."""
    parts = name.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(f'--models takes {", ".join(CUTS)} and BLOCKSxWIDTHxROWS, such as 8x64x16, with commas, found "{name}"')
    stack = Stack(*map(int, parts))
    if stack.blocks % n_stages:
        raise UsageError(f"{name}: {stack.blocks} blocks on {n_stages} stages are not equal")
    count = stack.blocks // n_stages
    return Pair(name, stack.task(n_micro), lambda _: nn.Sequential(*(Block(stack.width) for _ in range(count))))


class Ours:
    """A step of training as `mpitrain train` does it, the loss added up over ranks included."""

    def __init__(self, contender: Contender, world):
        self.contender, self.clock, self.losses = contender, Clock(world), []

    def take(self, _: int) -> float:
        return self.clock.time(self.step)

    def step(self) -> None:
        self.losses.append(self.contender.trainer.train_step(self.contender.micro_batches).loss)


class Theirs:
    """The stage of this rank in PyTorch; `losses` are known to the last one."""

    def __init__(self, module: nn.Module, schedule: str, n_micro: int, contender: Contender, world):
        set_parameters(module, [p.array for _, p in contender.job.state.model.named_parameters()])
        x, y = (torch.from_numpy(np.concatenate([getattr(m, name) for m in contender.micro_batches])) for name in "xy")
        loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
        self.stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](self.stage, n_micro, loss_fn=loss)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
        self.x, self.y, self.module, self.clock, self.losses = x, y, module, Clock(world), []
        self.rank, self.last = world.rank, world.size - 1

    def take(self, _: int) -> float:
        return self.clock.time(self.step)

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step(*([self.x] if self.rank == 0 else []), **({"target": self.y, "losses": losses}
                                                                     if self.rank == self.last else {}))
        self.optimizer.step()
        if losses:
            self.losses.append(float(torch.stack(losses).mean().detach()))


def check(ours: Ours, theirs: Theirs, what: str, channel: Channel) -> None:
    """MpitrainError, on all ranks, where the two did not train the same."""
    wrong = []
    if theirs.rank == theirs.last:
        wrong = [step for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
                 if abs(a - b) > TOLERANCE * abs(b)]
    found = [p.array for _, p in ours.contender.job.state.model.named_parameters()]
    far = max(float(abs(a - b.detach().numpy()).max()) for a, b in zip(found, theirs.module.parameters(), strict=True))
    everyone = channel.gather_objects([wrong[:1], far])
    if any(steps or distance > len(ours.losses) * LR * 0.1 for steps, distance in everyone):
        raise MpitrainError(f"{what}: the two sides differ (first step whose losses differ, largest difference of a parameter, "
                            f"for each rank: {everyone}); the times must not be used")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", default="1f1b,gpipe")
    parser.add_argument("--models", default="lenet-3,lenet-5,mlp-2,8x64x16,8x128x128,8x256x256")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with symmetric():
        names, models = arguments.names(options.schedules, SCHEDULES, "--schedules"), arguments.words(options.models, "--models")
        arguments.at_least(options.micro_batches, 1, "--micro-batches")
        arguments.at_least(options.pairs, 1, "--pairs")
    keep_freed_memory()
    world = start()
    if world.size == 1:
        raise SystemExit("one rank has no stage to pass on to; start it with mpirun -n 2")
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, options.json)
    pinned.keep_to_one_core(channel)
    n_micro = options.micro_batches
    with symmetric():
        if world.size > 2 and CUTS.keys() & set(models):
            raise UsageError(f"{', '.join(CUTS)} are cut for 2 stages here, found {world.size} ranks; start it with mpirun -n 2")
        pairs = [known(name) if name in CUTS else stacked(name, world.size, n_micro) for name in models]
    about, folder = machine(channel), connect(channel)
    report.line(f"{world.size} stages, {n_micro} micro-batches, medians of {options.pairs} pairs; PyTorch {torch.__version__} "
                f"over gloo\n{'model':<14}{'schedule':<9}{'ours':>11}{'PyTorch':>11}   times faster")
    for pair in pairs:
        for name in names:
            contender = Contender(name, pair.task, world, n_micro, 1)
            ours, theirs = Ours(contender, world), Theirs(pair.part(world.rank), name, n_micro, contender, world)
            result = alternate(ours.take, theirs.take, options.pairs).summary("torch")
            check(ours, theirs, f"{pair.name} {name}", channel)
            report.record({"bench": "pipeline_vs_torch", "model": pair.name, "schedule": name, "micro_batches": n_micro,
                           "stages": world.size, **result, "torch": torch.__version__, "machine": about})
            report.line(f"{pair.name:<14}{name:<9}{in_time(result['seconds']):>11}{in_time(result['torch_seconds']):>11}"
                        f"   {ratio_of(result)}")
            contender.close()
    disconnect(channel, folder)
    channel.close()
    return 0


if __name__ == "__main__":
    Process().run(main)
