"""`mpitrain serve`: a trained language model behind HTTP on this machine, for trying it."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.signals import launched_by_hydra
from mpitrain.comm.job.start import launched_rank
from mpitrain.config import load_run
from mpitrain.verbs import add_language_model

HELP = "answer completions of a language model over HTTP, on this machine alone"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--port", type=int, default=8000, help="of 127.0.0.1 (default: 8000); 0: one that is free")
    parser.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait; more get 503 (default: 32)")
    add_language_model(parser)


def run(options: Namespace, process: Process) -> int:
    if launched_rank()[0] == 0:
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            process.stop.listen(number)
    else:                                         # rank 0 stops all; Hydra passes signals on to them and waits
        for number in (signal.SIGUSR1, *((signal.SIGINT, signal.SIGTERM) if launched_by_hydra() else ())):
            signal.signal(number, signal.SIG_IGN)
    with guard.symmetric():
        config = load_run(options.folder, options.arguments)
    from mpitrain.infer.serve import serve
    return serve(options, config, process)
