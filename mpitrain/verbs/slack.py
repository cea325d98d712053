"""`mpitrain slack`: lower clocks for the stages of a pipeline that wait, from a table of clocks; without MPI."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

HELP = "lower clocks where a pipeline waits anyway: the same step for less energy, from a table of clocks"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="stage,instruction,frequency,time,energy, as of Zeus")
    parser.add_argument("--micro", type=int, default=8, metavar="N", help="micro-batches of a step (default: %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="as mesh.schedule (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=1, help="as mesh.chunks; the table has stages x chunks (default: 1)")
    parser.add_argument("--idle-watts", type=float, default=0.0, metavar="W", help="of a stage that waits (default: 0)")
    parser.add_argument("--message", type=float, default=0.0, metavar="S", help="seconds between two stages (default: 0)")
    parser.add_argument("--points", type=int, default=10, help="lines of the front (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="write the clock of each action of the same step")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.schedules.clocks import read_table, stages_in
    from mpitrain.schedules.pipeline_check import find_schedule
    from mpitrain.schedules.slack import Pipeline, front_of, lines_of, write_clocks
    refuse(options)
    table = read_table(options.table)
    if stages_in(table) % options.chunks:
        raise UsageError(f"--chunks {options.chunks} does not divide the {stages_in(table)} stages of {options.table}")
    n_stages = stages_in(table) // options.chunks
    schedule = find_schedule(options.schedule, Path.cwd(), n_stages=n_stages, n_micro=options.micro, chunks=options.chunks)
    pipeline = Pipeline(table, schedule, n_stages, options.micro, options.chunks, message=options.message,
                        idle_watts=options.idle_watts)
    front = front_of(pipeline, options.points)
    for line in lines_of(front, pipeline):
        print(line)
    if options.out is not None:
        write_clocks(options.out, front.fastest)
        print(f"clocks of each action in {options.out}")
    return 0


def refuse(options: Namespace) -> None:
    for flag, value, least in (("--micro", options.micro, 1), ("--chunks", options.chunks, 1), ("--points", options.points, 2),
                               ("--idle-watts", options.idle_watts, 0), ("--message", options.message, 0)):
        if not least <= value < float("inf"):
            raise UsageError(f"{flag} must be a finite number, {least} or more, found {value}")
