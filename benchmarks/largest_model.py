"""The largest transformer that trains under a limit on each rank's memory: sharded with recompute, and on one rank plain.

    python benchmarks/largest_model.py [--limit-mb 400] [--width 384] [--ranks 4] [--json FILE]

What a rank has is RssAnon + RssShmem of /proc/self/status; what counts is by how much that has grown, since MPI was started and
everything imported, after three steps with AdamW. Freed memory is kept (as in a run), so nothing that was needed in between is
missed. The depth is what grows: a job for each depth that is tried, found by a line through those before. The bar is 3.5 times
the parameters.
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

from mpitrain import data, models, nn, optim
from mpitrain.backend import keep_freed_memory
from mpitrain.bench.report import Report, machine
from mpitrain.bench.train import Memory
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import CommConfig, Config, TrainConfig
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs

BLOCK, VOCABULARY, STEPS, BAR = 32, 256, 3, 3.5
PLAIN, SHARDED = "plain", "sharded"


def held() -> int:
    """RssAnon + RssShmem of this process, in bytes (Linux 4.5 and later)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def inside(way: str, width: int, layers: int) -> int:
    """What each rank of a job does; rank 0 prints a JSON line."""
    keep_freed_memory()
    world = start()
    channel = Channel(world.comm.Dup(), "bench")
    about = machine(channel)
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS * world.size, BLOCK + 1))
    inputs = Inputs(Memory(rows[:, :-1], rows[:, 1:], "tokens"), range(len(rows)), None, range(0), data.Transforms())
    before = held()
    model = models.gpt(layers=layers, heads=8, width=width, block=BLOCK, vocabulary=VOCABULARY)
    model.recompute = way == SHARDED
    mesh = Mesh(world.comm)
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=lambda s: optim.AdamW(s, lr=1e-4),
                   quiet=True, config=Config(
                       train=TrainConfig(steps=STEPS, batch_size=world.size),
                       comm=CommConfig(bucket_mb=2, sharding="parameters" if way == SHARDED else "none")))
    job.fit()
    grown = channel.gather_objects(held() - before)
    if world.rank == 0:
        print(json.dumps({"way": way, "ranks": world.size, "width": width, "layers": layers, "grown_bytes": max(grown),
                          "parameters": model.count_parameters(), "machine": about}), flush=True)
    mesh.close()
    return 0


def job(way: str, ranks: int, width: int, layers: int) -> dict:
    """The record of `inside` on `ranks` ranks of this machine."""
    return launched(__file__, ranks, "--inside", way, "--width", str(width), "--layers", str(layers))


def launched(script: str, ranks: int, *arguments: str) -> dict:
    """The JSON line that a script prints on `ranks` ranks of this machine."""
    beside = Path(sys.executable).with_name("mpirun")
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    paths = os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))
    out = subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(ranks), sys.executable, script, *arguments],
                         check=True, text=True,
                         stdout=subprocess.PIPE, env={**scrubbed, **ROOT_MAY, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}).stdout
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def search(way: str, ranks: int, width: int, limit: int, report: Report) -> dict:
    """The record of the deepest model that stays below `limit` bytes."""
    tried: dict[int, dict] = {}

    def fits(layers: int) -> bool:
        record = tried[layers] = job(way, ranks, width, layers)
        report.record({"bench": "largest_model", **record, "limit_bytes": limit})
        report.line(f'{way:<9}{ranks:>3} ranks {layers:>4} layers {record["parameters"] / 1e6:>8.1f} million parameters '
                    f'{record["grown_bytes"] / 2**20:>7.1f} MiB')
        return record["grown_bytes"] <= limit

    low, high = 0, limit * ranks // (16 * 12 * width * width) + 2      # deeper than 16 bytes a parameter and nothing else allow
    guess = high // 2
    while high - low > 1:
        low, high = (guess, high) if fits(guess) else (low, guess)
        line = np.polyfit(list(tried), [record["grown_bytes"] for record in tried.values()], 1) if len(tried) > 1 else \
            (tried[guess]["grown_bytes"] / guess, 0.0)                 # memory is a straight line over layers, nearly
        guess = min(max(int((limit - line[1]) / line[0]), low + 1), high - 1)
        if len(tried) > 2 and guess in tried:
            break
    if low not in tried:
        raise SystemExit(f"not even one layer of width {width} fits into {limit / 2**20:.0f} MiB")
    return tried[low]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mb", type=int, default=400)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bar", type=float, default=BAR, help="how many times the parameters there must be")
    parser.add_argument("--layers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", choices=(PLAIN, SHARDED), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.inside, options.width, options.layers)
    report, limit = Report(0, options.json), options.limit_mb << 20
    report.line(f"at most {options.limit_mb} MiB of RssAnon + RssShmem more than before the model, on each rank")
    plain = search(PLAIN, 1, options.width, limit, report)
    sharded = search(SHARDED, options.ranks, options.width, limit, report)
    ratio = sharded["parameters"] / plain["parameters"]
    report.record({"bench": "largest_model", "ratio": ratio, "limit_bytes": limit})
    report.line(f'{sharded["parameters"] / 1e6:.1f} million parameters on {options.ranks} ranks, {plain["parameters"] / 1e6:.1f} '
                f"on one: {ratio:.2f} times as many (bar {options.bar})")
    return 0 if ratio >= options.bar else 1


if __name__ == "__main__":
    Process().run(main)
