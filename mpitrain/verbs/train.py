"""`mpitrain train`: a run on all ranks of the job."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import launched_rank
from mpitrain.config import Config, load_config
from mpitrain.errors import UsageError
from mpitrain.files.parser import start_parser

HELP = "train as a TOML file says (without one: the built-in digits run)"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", metavar="run.toml section.key=value", help="the run and what overrides it")
    parser.add_argument("--resume", nargs="?", const="latest", metavar="auto|FOLDER",
                        help="continue the run in run.out; auto: or start it where there is none; FOLDER: the run in there")
    parser.add_argument("--change", action="append", default=[], metavar="KEY",
                        help='with --resume: KEY (section.key, or "data") may differ from the checkpoint\'s; once for each')
    parser.add_argument("--strict", action="store_true",
                        help="with --resume: a damaged checkpoint, or any change without --change, is an error")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is in run.out (only what runs write)")
    parser.add_argument("--profile", action="store_true", help="write trace.json: the last steps of all ranks")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    process.stop.listen()                         # slow imports follow
    with guard.symmetric():
        config, resume = asked(options.arguments, options.resume)
        if resume and options.overwrite:
            raise UsageError("--resume continues a run and --overwrite deletes it; give one of them")
        if (options.change or options.strict) and not resume:
            raise UsageError("--change and --strict are for a run that goes on; give --resume too")
        if options.change:
            from mpitrain.train.build.experiment import refuse_unknown
            refuse_unknown(options.change)
    if not options.quiet:
        announce(config)
    parser = start_parser() if launched_rank()[0] == 0 else None      # it imports h5py while we import
    with guard.importing():
        from mpitrain.run import Run
    with Run.of_job(config, process, quiet=options.quiet, parser=parser) as started:
        started.train(resume=resume, overwrite=options.overwrite, profile=options.profile, change=options.change,
                      strict=options.strict)
    return 0


def announce(config: Config) -> None:
    """One line on rank 0 before anything that takes time: what starts here."""
    rank, size = launched_rank()
    if rank == 0:
        with contextlib.suppress(OSError, ValueError, UnicodeEncodeError):        # a closed stdout ends the display, not the run
            print(f"{config.run.name}: {config.model.name} on {config.data.path}, {size} rank{'s' if size > 1 else ''}, "
                  f"{config.train.device}, in {config.run.out}".encode("unicode_escape").decode(), flush=True)


def asked(arguments: list[str], resume: str | None) -> tuple[Config, str | None]:
    """The configuration that the command line names, and "latest" or "auto" if a run is to continue."""
    if resume and ("=" in resume or resume.endswith(".toml")):          # the word after --resume was not meant for it
        arguments, resume = [*arguments, resume], "latest"
    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) > 1:
        raise UsageError(f"one configuration file, found {len(files)}: {' '.join(files)}")
    if resume not in (None, "latest", "auto"):
        files = files or [str(Path(resume) / "config.toml")]
        overrides = [*overrides, f"run.out={resume}"]
        resume = "latest"
    return load_config(Path(files[0]) if files else None, overrides), resume
