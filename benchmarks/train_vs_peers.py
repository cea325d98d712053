"""A training step beside PyTorch's (eager and compiled) and JAX's: same model, same data, one thread each, in turn in one run.

    make bench-train      or    python benchmarks/train_vs_peers.py [--models mlp,gpt-nano] [--peers eager,jax] [--json FILE]
    python benchmarks/train_vs_peers.py --ranks 2          beside DistributedDataParallel over gloo, in two processes
    python benchmarks/train_vs_peers.py --memory           peak memory of each, in a process of its own

A step is forward, loss, backward, exchange, AdamW. All start from the same initial values and train on the same batches; the
losses of the first steps are compared, so a fast wrong step is refused. A few steps of one side follow those of another, in turn;
a ratio is the median over these rounds of the peer's time over ours, with its quartiles. Peers at their best documented settings:

    PyTorch     fused AdamW, zero_grad(set_to_none=True), scaled_dot_product_attention, for images channels_last (and as it comes)
    compiled    torch.compile, default mode, of the model with its loss; images channels_last
    JAX         one jitted step that reuses its arguments' memory, images channels_last; left out where it is not installed
    DDP         gloo over the loopback interface, gradient_as_bucket_view, static_graph, buffers not sent with each forward
    bfloat16    (--precision bfloat16, ours beside PyTorch) autocast, compiled autocast, and "medium" products

With --ranks each rank has a batch of the model's size, as `mpitrain bench train` has it, and a time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pinned  # first: it sets what NumPy, PyTorch and JAX read

# isort: split
import numpy as np
import torch
import torch_side
from accuracy import ROOT, ROOT_MAY
from allreduce_vs_gloo import connect, disconnect
from torch.nn.parallel import DistributedDataParallel

from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.pairs import Clock, Pairs, in_turn
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.bench.train import DECAY, LR, Training
from mpitrain.bench.workloads import WORKLOADS
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import World, start
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import NumericsError

DEFAULT = ("mlp", "lenet", "resnet20", "gpt-nano", "gpt-baby")
CHECKED = 4                                       # steps whose losses are compared; enough to compile everything, too
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}   # of the loss
MEMORY_PEERS = ("eager", "compiled", "jax")

Side = Any                                        # has step(), which gives the loss


def reduced(model: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False)


TORCH: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {"eager": {}, "channels_last": {"channels_last": True}, "compiled": {"compiled": True, "channels_last": True}},
    "bfloat16": {"autocast": {"precision": "autocast", "channels_last": True}, "medium": {"precision": "medium"},
                 "compiled": {"precision": "autocast", "compiled": True, "channels_last": True}},
    "ddp": {"ddp": {"wrap": reduced}, "ddp_channels_last": {"wrap": reduced, "channels_last": True}}}


def without_jax() -> str:
    """Why JAX is left out, or nothing."""
    return "" if find_spec("jax") else "JAX is left out: it is not installed (pip install jax)"


def peers_of(model: str, precision: str, ranks: int) -> dict[str, Callable[..., Side]]:
    """What can be measured beside ours, by name; each takes (batches, initial values)."""
    table = TORCH["ddp" if ranks > 1 else precision]
    found: dict[str, Callable[..., Side]] = {
        name: partial(make_torch, model, **settings) for name, settings in table.items()
        if not name.endswith("channels_last") or model in torch_side.IMAGES}
    if ranks == 1 and precision == "float32" and not without_jax():
        found["jax"] = partial(make_jax, model)
    return found


def make_torch(model: str, batches: Any, values: Any, **settings: Any) -> Side:
    torch.manual_seed(0)
    return torch_side.TorchSide(torch_side.MODELS[model](), batches, values, lr=LR, decay=DECAY, **settings)


def make_jax(model: str, batches: Any, values: Any) -> Side:
    import jax_side
    return jax_side.JaxSide(jax_side.MODELS[model], batches, values, lr=LR, decay=DECAY)


def names(precision: str, ranks: int) -> list[str]:
    """All peers there are in such a run, whatever the model."""
    return [*TORCH["ddp" if ranks > 1 else precision], *(["jax"] if ranks == 1 and precision == "float32" else [])]


def first_losses(sides: dict[str, Side], channel: Channel, tolerance: float, model: str) -> float:
    """Trains the first steps; the largest relative difference of a loss to ours. NumericsError where it is too large."""
    losses = {}
    for name, side in sides.items():
        ranks = channel.gather_objects([side.step() for _ in range(CHECKED)])     # ours: the mean already
        losses[name] = [statistics.fmean(values) for values in zip(*ranks)]
    worst = 0.0
    for name, theirs in losses.items():
        for step, (a, b) in enumerate(zip(losses["ours"], theirs)):
            difference = abs(a - b) / abs(b)
            worst = max(worst, difference)
            if not difference <= tolerance:                   # true for NaN as well
                raise NumericsError(f"{model}: our loss is {a:.7g}, that of {name} {b:.7g}; the two do not train the same model, "
                                    f"so their times must not be compared", step=step + 1)
    return worst


def turn(side: Side, clock: Clock, steps: int, _: int) -> float:
    """Seconds of a step of the slowest rank."""
    losses: list[float] = []
    seconds = clock.time(lambda: losses.extend(side.step() for _ in range(steps))) / steps
    if not all(map(math.isfinite, losses)):
        raise NumericsError(f"a loss of {losses} while steps were timed")
    return seconds


def compare(model: str, channel: Channel, world: World, options: argparse.Namespace, report: Report) -> None:
    """One record for each peer."""
    with symmetric():
        ours = Training(WORKLOADS[model], world.comm, sections={
            "train": {"precision": options.precision}, "comm": {"node_shared": options.node_shared}})
    values = [parameter.array.astype("float32") for _, parameter in ours.model.named_parameters()]
    makers = peers_of(model, options.precision, world.size)
    sides = {"ours": ours} | {name: make(ours.batches, values) for name, make in makers.items() if name in options.peers}
    with symmetric():
        worst = first_losses(sides, channel, TOLERANCE[options.precision], model)
    gc.collect()
    clock = Clock(world)
    times = dict(zip(sides, in_turn([partial(turn, side, clock, options.steps) for side in sides.values()], options.rounds)))
    ours.check(model)
    report.line(f"{model}: batch {WORKLOADS[model].batch}{' a rank' * (world.size > 1)}; the losses of the first {CHECKED} steps "
                f"differ by {worst:.1e} at most")
    report.line(f"  {'ours':<20}{in_time(statistics.median(times['ours'])):>11}")
    for name in list(sides)[1:]:
        result = Pairs(times["ours"], times[name]).summary("peer")
        report.record({"bench": "train_vs_peers", "model": model, "peer": name, "precision": options.precision,
                       "ranks": world.size, "threads": 1, **result, "steps": options.steps, "node_shared": options.node_shared,
                       "loss_difference": worst, "torch": torch.__version__, "machine": options.machine})
        report.line(f"  {name:<20}{in_time(result['peer_seconds']):>11}   {ratio_of(result)}")
    ours.close()


def compare_memory(model: str, options: argparse.Namespace, report: Report) -> None:
    """Starts a process for each side, one after the other; one record each."""
    report.line(f"{model}: MiB resident in a process that trains {options.rounds} steps\n"
                f"  {'side':<20}{'before':>9}{'peak':>9}{'more':>9}   ours / theirs: peak, more")
    workload, found = WORKLOADS[model], {}
    with tempfile.TemporaryDirectory() as folder:
        x, y = workload.samples(workload.batch, seed=0)
        values = workload.make()
        values.initialize(seed=0)
        given = Path(folder) / "given.npz"
        np.savez(given, x=x, y=y, **{f"value{i}": parameter.array for i, parameter in enumerate(values.parameters())})
        for side in ("ours", *(name for name in options.peers if name != "jax" or not without_jax())):
            command = [sys.executable, Path(__file__).with_name("peer_memory.py"), side, model, given, options.rounds]
            out = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
            found[side] = json.loads(out.splitlines()[-1])
            peak, more = (found["ours"][key] / found[side][key] for key in ("peak_mb", "more_mb"))
            report.record({"bench": "memory_vs_peers", "model": model, **found[side], "ratio": peak, "ratio_more": more})
            report.line(f"  {side:<20}" + "".join(f"{found[side][key]:>9.0f}" for key in ("before_mb", "peak_mb", "more_mb"))
                        + (f"   {peak:.2f}, {more:.2f}" if side != "ours" else ""))


def environment() -> dict[str, str]:
    """Ours, without what one mpirun tells its ranks, and with what lets root start another."""
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    return {**scrubbed, **ROOT_MAY, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))}


def on_ranks(ranks: int) -> int:
    """Starts this program again on so many ranks, each on a core of its own."""
    beside = Path(sys.executable).with_name("mpirun")
    return subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(ranks), "--bind-to", "core:overload-allowed",
                           sys.executable, *sys.argv, "--ranks", "0"], env=environment()).returncode


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join(WORKLOADS)} (default: all but gpt2; --memory: gpt-baby; "
                                         "--ranks: gpt-nano, mlp, resnet20)")
    parser.add_argument("--peers", help="eager, channels_last, compiled, jax; with --ranks ddp, ddp_channels_last (default: all)")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--rounds", type=int, default=20, help="how often each is timed; with --memory, its steps")
    parser.add_argument("--steps", type=int, default=2, help="in a turn: few, as a shared machine changes its speed")
    parser.add_argument("--ranks", type=int, default=0, help="start so many, beside DistributedDataParallel")
    parser.add_argument("--node-shared", action="store_true", help="ours as with comm.node_shared = true")
    parser.add_argument("--memory", action="store_true", help="compare memory instead of time")
    parser.add_argument("--json", type=Path)
    return parser


def settle(options: argparse.Namespace, ranks: int) -> list[str]:
    """Checks the flags and fills in what depends on others; the models' names."""
    known = [*MEMORY_PEERS] if options.memory else names(options.precision, ranks)
    options.peers = known if options.peers is None else arguments.names(options.peers, known, "--peers")
    for flag in ("rounds", "steps"):
        arguments.at_least(getattr(options, flag), 1, f"--{flag}")
    default = ("gpt-baby",) if options.memory else ("gpt-nano", "mlp", "resnet20") if ranks > 1 else DEFAULT
    return list(default) if options.models is None else arguments.names(options.models, WORKLOADS, "--models")


def main() -> int:
    options = parser().parse_args()
    if options.ranks > 1:
        return on_ranks(options.ranks)
    world = start()
    with symmetric():
        models = settle(options, world.size)
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, options.json)
    if options.memory:
        for model in models:
            compare_memory(model, options, report)
        return 0
    pinned.keep_to_one_core(channel)
    keep_freed_memory()                                       # as `mpitrain train` does; it serves PyTorch's malloc too
    options.machine = machine(channel)
    folder = connect(channel) if world.size > 1 else None
    torch.set_num_threads(1)
    report.line(f"training steps beside PyTorch {torch.__version__}, {options.precision}, {world.size} "
                f"rank{'s' * (world.size > 1)} of one thread; medians of {options.rounds} rounds of {options.steps} steps\n"
                f"  {'':<20}{'step':>11}   times faster (quartiles)")
    if "jax" in options.peers and without_jax():
        report.line(without_jax())
    for model in models:
        compare(model, channel, world, options, report)
    if folder is not None:
        disconnect(channel, folder)
    channel.close()
    return 0


if __name__ == "__main__":
    Process().run(main)
