"""`mpitrain search`: a study of many trials on all ranks of the job."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.search.progress import StudyProgress
    from mpitrain.search.study_file import Study

HELP = "search for the best values of a run's keys: trials on groups of ranks, as a study file says"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", metavar="study.toml section.key=value",
                        help="the study, a run file with [search] and [space], and what overrides it")
    parser.add_argument("--resume", action="store_true", help="go on with the study in run.out; trials that are done stay")
    parser.add_argument("--overwrite", action="store_true", help="delete the study that is in run.out (only what studies write)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the best trial and errors")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    process.stop.listen()
    with guard.symmetric():
        path, overrides = asked(options.arguments)
        if options.resume and options.overwrite:
            raise UsageError("--resume continues a study and --overwrite deletes it; give one of them")
    with guard.importing():
        from mpitrain.comm.job.start import launched_rank
        from mpitrain.search.study import best_of, search
        from mpitrain.search.study_file import read_study
    with guard.symmetric():
        study = read_study(path, overrides)
    progress = None if options.quiet or launched_rank()[0] else progress_of(study)
    told = {} if progress is None else {"told": progress}
    found = search(study, process, resume=options.resume, overwrite=options.overwrite, **told)
    if progress is not None:
        progress.finish()
    if launched_rank()[0] == 0:
        for line in found.get("privacy", {}).get("said", ()):
            print(line)
        print(best_of(found), flush=True)
    return 0


def progress_of(study: Study) -> StudyProgress:
    """Lines of rank 0 about a study, as often as log.progress_s says."""
    from mpitrain.search.progress import StudyProgress
    from mpitrain.train.observers.log import Progress, is_watched
    lines = Progress(0, every_s=0.0)                          # a stdout that goes away ends the lines, not the study
    return StudyProgress(study.base.log.progress_s, watched=is_watched(sys.stdout), tell=lines.message)


def asked(arguments: list[str]) -> tuple[Path, list[str]]:
    """The study file that the command line names, and what overrides it."""
    files = [word for word in arguments if "=" not in word]
    if len(files) != 1:
        raise UsageError(f"one study file, found {len(files)}: {' '.join(files) or 'none'}")
    return Path(files[0]), [word for word in arguments if "=" in word]
