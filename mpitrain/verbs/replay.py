"""`mpitrain replay`: a step of a run computed again by each rank alone; a JSON line, and an error if the bits differ."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import load_run

HELP = "compute a step of a run again and compare its bits: with the record, and between ranks"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, required=True, help="the step as metrics.jsonl counts it, from 1")
    parser.add_argument("--micro-batch", type=int, help="this micro-batch of it alone, from 0")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.backend import keep_freed_memory
    from mpitrain.comm.job.start import start
    from mpitrain.run.replay import raise_alike, replay
    from mpitrain.run.session import before_mpi, look_at_files
    with guard.symmetric():
        config = load_run(options.folder, [])
    keep_freed_memory()                           # this may ask the compiler: nothing forks once MPI has started
    if config.train.device != "cpu":
        from mpitrain.backend.compiling import compile_ahead
        compile_ahead(config.train.device)
    files = before_mpi(lambda: look_at_files(config))
    comm = start().comm
    found, wrong = replay(config, options.folder, comm, files, step=options.step, micro_batch=options.micro_batch)
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    raise_alike(wrong)
    return 0
