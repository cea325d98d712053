"""`mpitrain inspect`: the content of a run, a study, a configuration, a data file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

HELP = "what is in a run, a study, a configuration, a data file; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--ranks", type=int, help="draw the placement of a configuration for so many ranks (default: 1)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report of a study there, too, with its drawings")


def run(options: Namespace, process: Process) -> int:
    if is_study(options.path):
        return show_study(options)
    if options.html is not None:
        raise UsageError(f"--html is for the folder of a study, and {options.path} is none")
    from mpitrain.plan.inspect import inspect
    for line in inspect(options.path, options.arguments, ranks=options.ranks):
        print(line)
    return 0


def is_study(path: Path) -> bool:
    """Whether a folder is a study's, by what else than runs it has; the journal may be lost."""
    return any((path / name).is_file() for name in ("journal.jsonl", "study.json", "best.toml")) or (
        (path / "trials").is_dir() and (path / "config.toml").is_file())


def show_study(options: Namespace) -> int:
    if options.arguments or options.ranks is not None:
        raise UsageError(f"{options.arguments[0] if options.arguments else '--ranks'} is for a configuration (.toml), and "
                         f"{options.path} is a study")
    from mpitrain.search.report import read_report
    from mpitrain.search.report_lines import report_lines
    report = read_report(options.path)
    for line in report_lines(report):
        print(line)
    if options.html is not None:
        from mpitrain.search.report_html import write_html
        write_html(report, options.html)
        print(f"drawn in {options.html}")
    return 0
