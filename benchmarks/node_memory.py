"""Memory that a model takes on one node, all ranks together, for each way of keeping it.

    python benchmarks/node_memory.py [--ranks 8] [--parameters 10000000] [--json FILE]

Starts one job for each policy. Each adds up PSS (proportional set size: a page shared by k processes counts 1/k in each) over the
ranks before the model exists and after two steps of gradient sum and AdamW, when every page has been touched, and prints the
difference, beside what a copy of every array on each rank makes by arithmetic, and beside what that was measured to take. Before
the first figure the same steps are done with a tiny model, so code and MPI's own buffers are in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np
from accuracy import ROOT, ROOT_MAY

from mpitrain.bench.exchange import BUCKET_BYTES, POLICIES
from mpitrain.bench.report import Report, machine
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel

TINY = 10_000
REPLICATED = "replicated"                                           # what the others are compared with, once it is measured
BYTES = {"parameters": 4, "gradients": 4, "AdamW's state": 8}       # a parameter, in float32


def pss() -> int:
    """Bytes of this process's proportional set size (Linux 4.14 and later)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise SystemExit("/proc/self/smaps_rollup has no Pss: on this kernel")


def total(world) -> int:
    """The sum over ranks, taken while nobody allocates."""
    every = np.zeros(world.size, np.int64)
    world.comm.Barrier()
    world.comm.Allgather(np.array([pss()], np.int64), every)
    return int(every.sum())


def steps(world, policy, count) -> None:
    for value in (1.0, 2.0):
        policy.gradients()[:count] = value * (1 + world.rank)
        policy.step()


def one_rank(name: str, count: int) -> int:
    """What each rank of a job does; rank 0 prints a JSON line."""
    world = start()
    channel = Channel(world.comm.Dup(), "bench")
    about = machine(channel)
    tiny = POLICIES[name](world, TINY, BUCKET_BYTES)
    steps(world, tiny, TINY)
    tiny.close()
    before = total(world)
    policy = POLICIES[name](world, count, BUCKET_BYTES)
    steps(world, policy, count)
    after = total(world)
    if world.rank == 0:
        print(json.dumps({"policy": name, "ranks": world.size, "parameters": count, "before_bytes": before,
                          "after_bytes": after, "model_bytes": after - before, "machine": about}))
    policy.close()
    return 0


def job(name: str, ranks: int, count: int) -> dict:
    """Runs `one_rank` on `ranks` ranks of this machine; its record."""
    beside = Path(sys.executable).with_name("mpirun")
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    paths = os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))
    out = subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(ranks), sys.executable, __file__, "--inside",
                          name, "--parameters", str(count)], check=True, stdout=subprocess.PIPE, text=True,
                         env={**scrubbed, **ROOT_MAY, "PYTHONPATH": paths}).stdout
    return json.loads(out.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return one_rank(options.inside, options.parameters)
    report, plain = Report(0, options.json), sum(BYTES.values()) * options.ranks * options.parameters
    report.line(f"PSS of {options.ranks} ranks with {options.parameters:,} parameters, less PSS before the model\n"
                f"{'policy':<16}{'MiB':>10}{'bytes/parameter':>18}   of {plain / 2 ** 20:.0f} MiB ("
                f"{', '.join(f'{name} {count}' for name, count in BYTES.items())} bytes, on each rank)")
    found: dict[str, int] = {}
    for name in POLICIES:
        record = job(name, options.ranks, options.parameters)
        found[name] = record["model_bytes"]
        beside = {"ratio": found[name] / plain}
        if REPLICATED in found:
            beside["to_replicated"] = found[name] / found[REPLICATED]
        report.record({"bench": "node_memory", **record, **beside})
        report.line(f"{name:<16}{found[name] / 2 ** 20:>10.1f}{found[name] / options.parameters:>18.1f}   {beside['ratio']:.3f}"
                    + (f"   {beside['to_replicated']:.3f} of {REPLICATED}, measured" if REPLICATED in found else ""))
    return 0


if __name__ == "__main__":
    Process().run(main)
