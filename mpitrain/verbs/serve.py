"""`mpitrain serve`: a trained language model behind HTTP on this machine, for trying it."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import load_run
from mpitrain.verbs import add_step

HELP = "answer completions of a language model over HTTP, on this machine alone"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--port", type=int, default=8000, help="of 127.0.0.1 (default: 8000); 0: one that is free")
    parser.add_argument("--slots", type=int, default=8, metavar="N", help="texts at a time (default: 8)")
    parser.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait; more get 503 (default: 32)")
    parser.add_argument("--vocabulary", type=Path, metavar="FOLDER",
                        help="the table of tokens: vocab.json and merges.txt, or a data folder (default: the run's data)")
    add_step(parser)
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        process.stop.listen(number)
    with guard.symmetric():
        config = load_run(options.folder, options.arguments)
    from mpitrain.infer.serve import serve
    return serve(options, config, process)
