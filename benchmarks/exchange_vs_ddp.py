"""Gradient sum + AdamW + parameters visible to all, beside PyTorch's DistributedDataParallel and fused AdamW.

    mpirun -n 2 python benchmarks/exchange_vs_ddp.py [--policy node_shared] [--parameters 10000000] [--json FILE]

Ours is timed from the moment the last gradient lies where backward writes it, until the parameters are new on every rank; the
buckets start one after the other, as at the end of backward.

PyTorch is timed from the start of backward() of a module under DistributedDataParallel to the end of optimizer.step(), less
backward() of the same module without it, timed just before: what is left is what reducing adds to backward, plus the update.
The module's backward does nothing but make the gradients (one copy each), last parameters first, so there is next to nothing
for its messages to hide behind, as there is for ours. Its forward and zero_grad are not timed. Settings: gloo over the loopback
interface, gradient_as_bucket_view, static_graph, fused AdamW, one thread, and the bucket_cap_mb that is fastest here.

Both get the same gradients, and after each step all parameters are compared with a float64 run. The sides alternate.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import numpy as np
import torch
from allreduce_vs_gloo import connect, disconnect
from torch.nn.parallel import DistributedDataParallel

from mpitrain.bench import arguments
from mpitrain.bench.exchange import BETAS, BUCKET_BYTES, DECAY, EPS, LR, MATRIX, POLICIES, Serial, Steps
from mpitrain.bench.inputs import Inputs
from mpitrain.bench.pairs import Clock, alternate
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel

CAPS = (1, 4, 10, 25, 100)                       # MB, tried for bucket_cap_mb; 25 is PyTorch's default
TRIAL = 3                                        # steps of each


class Give(torch.autograd.Function):
    """The identity; its backward brings a given gradient to a parameter, in fresh memory as an op's backward does."""

    @staticmethod
    def forward(ctx, x, parameter, gradient):
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.gradient.clone(), None


class Weights(torch.nn.Module):
    """The parameters of `mpitrain.bench.exchange.Weights`, with `gradients` for each."""

    def __init__(self, count):
        super().__init__()
        sizes = [min(MATRIX, count - start) for start in range(0, count, MATRIX)]
        self.matrices = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size, 1)) for size in sizes)
        self.gradients = [torch.zeros(size, 1) for size in sizes]

    def forward(self, x):
        for parameter, gradient in zip(self.matrices, self.gradients):
            x = Give.apply(x, parameter, gradient)
        return x.sum()


class Theirs:
    """One module under DistributedDataParallel and its twin without, both fed with the same gradients."""

    def __init__(self, world, inputs, serial, cap):
        self.world, self.inputs, self.serial, self.cap = world, inputs, serial, cap
        self.clock, self.done = Clock(world), 0
        self.module, self.alone = Weights(inputs.length), Weights(inputs.length)
        self.alone.gradients = self.module.gradients
        self.reduced = DistributedDataParallel(self.module, bucket_cap_mb=cap, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        self.whole: list[float] = []
        self.local: list[float] = []

    def take(self, _: int = 0) -> float:
        """Seconds of the reduction and the update of the next step, of the slowest rank."""
        flat = np.empty(self.inputs.length, np.float32)
        self.inputs.fill(flat, self.world.rank, self.done)
        flat *= self.world.size                                    # DistributedDataParallel divides by it
        for gradient, part in zip(self.module.gradients, torch.split(torch.from_numpy(flat), MATRIX)):
            gradient.view(-1).copy_(part)
        self.local.append(self.timed(self.alone, lambda: None))
        self.whole.append(self.timed(self.reduced, self.optimizer.step))
        self.done += 1
        return self.whole[-1] - self.local[-1]

    def timed(self, module, after) -> float:
        module.zero_grad(set_to_none=True)
        loss = module(torch.ones(1, requires_grad=True))

        def run() -> None:
            loss.backward()
            after()
        return self.clock.time(run)

    def take_checked(self, turn: int) -> float:
        seconds = self.take(turn)
        found = np.concatenate([parameter.detach().numpy().ravel() for parameter in self.module.parameters()])
        self.serial.check(found, "DistributedDataParallel")
        return seconds


def tuned(world, inputs, serial):
    """The Theirs with the fastest bucket_cap_mb, from a few steps of each; the clock gives all ranks the same times."""
    times = {}
    for cap in CAPS:
        theirs = Theirs(world, inputs, serial, cap)
        theirs.take()                                              # buckets are laid out anew after the first step
        times[cap] = statistics.median([theirs.take() for _ in range(TRIAL)])
    return Theirs(world, inputs, serial, min(times, key=times.__getitem__))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=list(POLICIES), default="node_shared")
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with symmetric():
        arguments.at_least(options.parameters, 1, "--parameters")
        arguments.at_least(options.pairs, 1, "--pairs")
    world = start()
    if world.size == 1:
        raise SystemExit("one rank has nothing to exchange; start it with mpirun -n 2")
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, options.json)
    about = machine(channel)
    folder = connect(channel)
    inputs = Inputs(options.parameters, "float32", world.size)
    serial = Serial(inputs)
    theirs = tuned(world, inputs, serial)
    policy = POLICIES[options.policy](world, options.parameters, BUCKET_BYTES)
    policy.values[...] = 0
    channel.barrier()
    ours = Steps(policy, f"exchange {options.policy}", world, inputs, serial)
    result = alternate(ours.take, theirs.take_checked, options.pairs).summary("torch")
    parts = {"torch_backward_and_step_seconds": statistics.median(theirs.whole[-options.pairs:]),
             "torch_local_backward_seconds": statistics.median(theirs.local[-options.pairs:])}
    report.record({"bench": "exchange_vs_ddp", "algorithm": options.policy, "bytes": 4 * options.parameters, "dtype": "float32",
                   "ranks": world.size, **result, **parts, "parameters": options.parameters, "bucket_cap_mb": theirs.cap,
                   "torch": torch.__version__, "machine": about})
    report.line(f"gradient sum + AdamW of {options.parameters:,} parameters on {world.size} ranks; "
                f"medians of {options.pairs} pairs\n"
                f"  ours ({options.policy})   {in_time(result['seconds']):>10}\n"
                f"  PyTorch {torch.__version__:<8}   {in_time(result['torch_seconds']):>10}   DistributedDataParallel "
                f"(bucket_cap_mb {theirs.cap}) + fused AdamW: backward and step "
                f"{in_time(parts['torch_backward_and_step_seconds'])}, less {in_time(parts['torch_local_backward_seconds'])} "
                f"of backward without it\n"
                f"  times faster         {ratio_of(result)}")
    policy.close()
    disconnect(channel, folder)
    channel.close()
    return 0


if __name__ == "__main__":
    Process().run(main)
