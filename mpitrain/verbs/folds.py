"""`mpitrain folds`: a run for each fold of the data, one after the other on all ranks, and the mean of their metrics."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.config import Config, changed
from mpitrain.errors import OutputError, UsageError
from mpitrain.files.disk import replace_file

if TYPE_CHECKING:
    from mpitrain.run import Trained

HELP = "train as a TOML file says on each of K folds, and print the mean and the deviation of their metrics"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", metavar="run.toml section.key=value", help="the run and what overrides it")
    parser.add_argument("--k", type=_folds, default=5, metavar="K", help="the number of folds (5)")
    parser.add_argument("--stratified", action="store_true", help="folds with as many rows of each class")
    parser.add_argument("--resume", action="store_true", help="go on with folds that have begun; those that are done stay")
    parser.add_argument("--overwrite", action="store_true", help="delete the runs that are in run.out/fold-*")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the metrics and errors")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.verbs.train import asked
    process.stop.listen()
    with guard.symmetric():
        config, _ = asked(options.arguments, None)
        if options.resume and options.overwrite:
            raise UsageError("--resume continues runs and --overwrite deletes them; give one of them")
        refuse_split(config, stratified=options.stratified)
        if config.run.out == ".":
            raise UsageError("run.out is the working folder; set it to a folder for the runs of the folds")
    with guard.importing():
        from mpitrain.comm.job.together import on_first
        from mpitrain.run import Run
        from mpitrain.run.session import before_mpi, look_at_files
    configs = configs_of(config, options.k, stratified=options.stratified)
    files = before_mpi(partial(look_at_files, configs[0]))            # All folds are of one file, which is examined once.
    found, comm, table = list[Any](), None, Path(config.run.out, "folds.json")

    def told() -> str:
        line = json.dumps({"folds": options.k, "metrics": summary(found)})
        write_table(table, line + "\n")
        return line
    for one in configs:
        made = Run.of_job(one, process, quiet=options.quiet, look=files) if comm is None else \
            Run(one, comm, process=process, quiet=options.quiet, files=files)
        with made as started:
            if comm is None:
                on_first(started.open().control, partial(refuse_table, table))        # before hours of training
            found.append(started.train(resume="auto" if options.resume else None, overwrite=options.overwrite))
            comm = started.comm                               # without the ranks that were lost
            # Ranks that have ended wait in MPI_Finalize, and mpirun may hang if another one aborts then: all are told.
            line = on_first(started.open().control, told) if one is configs[-1] else ""
    if comm is not None and comm.rank == 0:
        print(line, flush=True)
    return 0


def refuse_table(path: Path) -> None:
    """OutputError where the file of the metrics could not take its place."""
    if path.is_dir():
        raise OutputError("the metrics of the folds go into this file, and it is a folder; move it away, or set another run.out",
                          file=path)


def write_table(path: Path, text: str) -> None:
    """Replaces the file; a reader sees the old text or the new one. OutputError or StorageError where it cannot."""
    refuse_table(path)
    replace_file(path, text)


def refuse_split(config: Config, *, stratified: bool) -> None:
    """ConfigError where data.validation names rows that no fold would be validated on. A share, its default, is of the same
    rows as the folds are."""
    from mpitrain.data import fold_of, is_file
    asked = config.data.validation
    if is_file(asked):
        raise config.wrong(f'data.validation = "{asked}" is a file of other rows, and folds are validated on rows of data.path; '
                           "leave it out, and `evaluate` the runs of the folds on it afterwards", ("data.validation",))
    fold = fold_of(asked)
    if fold is not None and fold.stratified and not stratified:
        raise config.wrong(f'data.validation = "{asked}" is a stratified fold, and folds without --stratified are not; give '
                           "--stratified, or leave it out", ("data.validation",))


def configs_of(config: Config, k: int, *, stratified: bool = False) -> list[Config]:
    """The configuration of each fold; its run is in run.out/fold-1 ..."""
    kind = "stratified" if stratified else "fold"
    return [changed(config, run={"out": f"{config.run.out}/fold-{i}", "name": f"{config.run.name}-{i}"},
                    data={"validation": f"{kind}:{i}/{k}"}) for i in range(1, k + 1)]


def summary(found: Sequence[Trained]) -> Mapping[str, Any]:
    """For each metric its values in the order of the folds, their mean and their standard deviation (of a sample, K - 1); None
    where a value is not finite."""
    table = {}
    for name in found[0].metrics:
        values = [one.metrics[name] for one in found]
        if all(map(math.isfinite, values)):
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
            table[name] = {"mean": mean, "deviation": deviation, "values": values}
        else:
            table[name] = {"mean": None, "deviation": None, "values": [v if math.isfinite(v) else None for v in values]}
    return table


def _folds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 2):
        raise ArgumentTypeError(f"must be 2 or more, found {text}")
    return int(text)
