"""`mpitrain evaluate`: the metrics of a checkpoint of a run, printed as one JSON line by rank 0."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import changed, load_run
from mpitrain.config.shrink_sections import DistilConfig
from mpitrain.verbs import add_step

HELP = "the metrics of a run's newest checkpoint, of a step, or of the best one"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    add_step(parser)
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.run.saved_run import SavedRun
    from mpitrain.train.observers.log import plain_values
    with guard.symmetric():
        config = changed(load_run(options.folder, options.arguments), distil=vars(DistilConfig()))     # nothing is learned here
    with SavedRun.of_job(config, process) as started:
        found = started.evaluate(options.folder, options.step)
        if started.comm.rank == 0:
            line = {"step": found.step, "split": "validation", **plain_values(found.metrics), **found.tables}
            print(json.dumps(line), flush=True)
    return 0
