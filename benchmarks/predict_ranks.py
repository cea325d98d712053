"""`mpitrain predict` on 2 ranks beside 1: pairs of whole passes over the rows in one job, without its start; outputs compared.

    mpirun -n 2 python benchmarks/predict_ranks.py [--model resnet20] [--rows 8192] [--pairs 9]

A run folder with random weights is made, and rows are written, in a temporary folder. A pass of one rank goes on while the other
waits; a pass of both is as long as the slower one's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pinned  # first: it sets what NumPy reads

# isort: split
import h5py
import numpy as np
from predict_vs_ort import MODELS, made

from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank, start
from mpitrain.config import changed, load_run
from mpitrain.data.unlabelled import describe_rows
from mpitrain.infer.predict import predict
from mpitrain.run.saved_run import SavedRun
from mpitrain.train.build.saved import save


def prepare(model: str, rows: int) -> tuple[Path, Any]:
    """The folder with a run and rows, and what the rows are."""
    folder = Path(tempfile.mkdtemp(prefix="predict-"))
    save(folder / "run", made(model), {"by": "a benchmark"})
    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"] = np.random.default_rng(0).normal(size=(rows, *MODELS[model][1])).astype(np.float32)
    return folder, {"training": describe_rows(folder / "rows.h5")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    prepared = prepare(options.model, options.rows) if launched_rank()[0] == 0 else None      # before MPI: a child reads HDF5
    comm = start().comm
    folder, files = comm.bcast(prepared)
    config = changed(load_run(folder / "run", []), train={"threads": 1})
    alone = comm.Split(comm.rank, 0)
    runs = {1: SavedRun(config, alone, quiet=True, files=lambda: files) if comm.rank == 0 else None,
            2: SavedRun(config, comm, quiet=True, files=lambda: files)}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    hashes = set()
    for turn in range(2 * options.pairs + 2):
        n = 1 + turn % 2
        comm.Barrier()
        began, run = time.perf_counter(), runs[n]
        if run is not None:
            hashes.add(predict(run, folder / "run", folder / f"out-{turn}.h5").sha256)
        comm.Barrier()
        seconds[n] += [time.perf_counter() - began] if turn > 1 else []
    if comm.rank == 0:
        ratios = [one / two for one, two in zip(seconds[1], seconds[2])]
        print(f"{options.model}, {options.rows:,} rows: 1 rank {statistics.median(seconds[1]):.3f} s, {comm.size} ranks "
              f"{statistics.median(seconds[2]):.3f} s, ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
              f"{max(ratios):.2f}); {'the same bytes' if len(hashes) == 1 else 'OTHER BYTES'}", flush=True)
        shutil.rmtree(folder)
    for run in runs.values():
        if run is not None:
            run.close()
    return 0


if __name__ == "__main__":
    assert pinned
    Process().run(main)
