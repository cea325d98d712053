"""`mpitrain predict`: the outputs of a run's model for the rows of a file, in their order; rank 0 prints one JSON line."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import changed, load_run
from mpitrain.errors import UsageError
from mpitrain.verbs import add_step

HELP = "the outputs of a run's model for the rows of a file, in their order, on any number of ranks"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("data", help="rows: HDF5, NPZ, NPY, CSV, or a folder of HDF5 shards")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ending in .h5, .hdf5, .npz or .csv")
    parser.add_argument("--x", metavar="NAME", action="append",
                        help="the dataset of HDF5, the array of NPZ, or columns of CSV (a,b,c); of inputs by name once for each: "
                        "--x INPUT=NAME")
    parser.add_argument("--as", dest="keep", default="outputs", metavar="WHAT",
                        help="outputs (default), classes or probabilities")
    parser.add_argument("--inverse", action="store_true",
                        help="outputs in the units of the targets: data.target_transform undone")
    add_step(parser)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with what a killed job left")
    again.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def asked(names: list[str]) -> str | dict[str, str] | None:
    """What --x says. UsageError where that is nothing, or several names are no table."""
    if not names:
        return None
    if "" in names:
        raise UsageError("--x is the name of a dataset, found none; leave it out, or give one")
    pairs = [name.partition("=") for name in names]
    if len(names) == 1 and not pairs[0][1]:
        return names[0]
    if not all(name and equals and dataset for name, equals, dataset in pairs):
        raise UsageError(f"several --x are inputs by name, each INPUT=NAME, found {' '.join(names)}")
    return {name: dataset for name, _, dataset in pairs}


def run(options: Namespace, process: Process) -> int:
    from mpitrain.data.unlabelled import describe_rows
    from mpitrain.infer import output
    from mpitrain.infer.predict import predict
    from mpitrain.run.saved_run import SavedRun
    with guard.symmetric():
        # Sharding is for what training keeps: parameters alone are whole on each rank, unless the user says otherwise.
        config = load_run(options.folder, ["comm.sharding=none", *options.arguments])
        config = changed(config, train={"threads": 1})                                         # those of BLAS change bits
        x = asked(options.x or [])

    def look() -> dict[str, Any]:
        found = describe_rows(options.data, x, default=config.data.x or None)
        output.refuse(options.out, [shard["file"] for shard in found["shards"]], resume=options.resume,
                      overwrite=options.overwrite)
        return {"training": found}

    with SavedRun.of_job(config, process, look=look) as started:
        done = predict(started, options.folder, options.out, step=options.step, keep=options.keep,
                       inverse=options.inverse, resume=options.resume)
        if started.comm.rank == 0:
            print(json.dumps({"step": done.step, "rows": done.shape[0], "shape": done.shape[1:], "dtype": done.dtype,
                              "nonfinite_inputs": done.nonfinite_inputs, "nonfinite_outputs": done.nonfinite_outputs,
                              "out": str(options.out), "sha256": done.sha256}), flush=True)
    return 0
