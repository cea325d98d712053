"""Our all-reduce beside gloo, PyTorch's CPU back end for distributed training: alternately in one run, every sum checked.

    mpirun -n 2 python benchmarks/allreduce_vs_gloo.py [--algorithm shared] [--sizes 1M,16M] [--json FILE]

Both sum in place, one thread a rank, in ordinary memory unless the algorithm brings its own. gloo connects over the loopback
interface, as torchrun would make it on one machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import torch
from torch import distributed

from mpitrain.bench import arguments
from mpitrain.bench.allreduce import Contender, Side, arrays_a_turn, contender, known
from mpitrain.bench.inputs import Inputs
from mpitrain.bench.pairs import alternate
from mpitrain.bench.report import Report, in_bytes, in_time, machine, ratio_of
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel


def gloo_allreduce(array):
    """What calls torch.distributed.all_reduce on a tensor that shares the array's memory."""
    return lambda: distributed.all_reduce(torch.from_numpy(array))


def connect(channel) -> Path:
    """Joins all ranks in gloo's process group, over a file they all see; returns its folder, to be deleted."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(channel.broadcast_object(tempfile.mkdtemp(prefix="gloo-") if channel.rank == 0 else None))
    distributed.init_process_group("gloo", store=distributed.FileStore(str(folder / "store"), channel.size), rank=channel.rank,
                                   world_size=channel.size, timeout=datetime.timedelta(seconds=60))
    return folder


def disconnect(channel, folder: Path) -> None:
    distributed.destroy_process_group()
    channel.barrier()
    if channel.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="shared")
    parser.add_argument("--sizes", default="1M,16M")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with symmetric():
        sizes = arguments.sizes(options.sizes)
        arguments.whole_elements(sizes, ["float32"])
        algorithm, = arguments.algorithms(options.algorithm, known())
    world = start()
    if world.size == 1:
        raise SystemExit("one rank has nothing to exchange; start it with mpirun -n 2")
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, options.json)
    about = machine(channel)
    folder = connect(channel)
    ours = Side(algorithm, contender(algorithm, world), world, sizes)
    gloo = Side("of gloo", Contender(gloo_allreduce, close=lambda: None), world, sizes)
    report.line(f"all-reduce on {world.size} ranks beside gloo (PyTorch {torch.__version__}); medians of {options.pairs} pairs\n"
                f"{'algorithm':<24}{'bytes':>10}{'ours':>11}{'gloo':>11}   times faster")
    for size in sizes:
        inputs = Inputs(size // 4, "float32", world.size)
        result = alternate(partial(ours.turn, inputs), partial(gloo.turn, inputs), options.pairs).summary("gloo")
        report.record({"bench": "allreduce_vs_gloo", "algorithm": algorithm, "bytes": size, "dtype": "float32",
                       "ranks": world.size, **result, "arrays_a_turn": arrays_a_turn(size), "torch": torch.__version__,
                       "machine": about})
        report.line(f"{algorithm:<24}{in_bytes(size):>10}{in_time(result['seconds']):>11}"
                    f"{in_time(result['gloo_seconds']):>11}   {ratio_of(result)}")
    ours.close()
    disconnect(channel, folder)
    channel.close()
    return 0


if __name__ == "__main__":
    Process().run(main)
