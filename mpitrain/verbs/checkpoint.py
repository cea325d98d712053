"""`mpitrain checkpoint`: list the checkpoints of a run, and verify them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process

HELP = "list a run's checkpoints, verify their checksums; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="checkpoint_verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="step, date, size, parts, the mesh that wrote it, hash of the parameters")
    listing.add_argument("path", type=Path, metavar="RUN", help="a run folder")
    verifying = verbs.add_parser("verify", help="read everything and compare every SHA-256; exit status 65 if one differs")
    verifying.add_argument("path", type=Path, metavar="RUN|STEP-FOLDER", help="a run folder, or one checkpoint in it")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.plan import checkpoints
    for line in (checkpoints.listed if options.checkpoint_verb == "list" else checkpoints.verified)(options.path):
        print(line, flush=True)
    return 0
