"""`mpitrain paths`: the metrics of paths of a trained supernet, or a search over them, one JSON line a path from rank 0."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError
from mpitrain.verbs import add_step

HELP = "evaluate paths of a trained supernet, or search for the best ones"
OF_SEARCH = {"seed": 0, "parents": 20, "tournament": 5}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run folder of a supernet")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--path", action="append", metavar="PATH",
                      help='a path to evaluate: "largest", "smallest", or choices such as "depth=2, block0.width=16", in which '
                           "those left out are the largest; may be given several times")
    what.add_argument("--trials", type=int, metavar="N", help="paths that a search evaluates, by regularised evolution")
    parser.add_argument("--objective", action="append", metavar="NAME",
                        help="a metric, -ms, -parameters or -flops; several give a Pareto front (default: accuracy or loss)")
    for name, value in OF_SEARCH.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the search (default: {value})")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")
    add_step(parser)


def run(options: Namespace, process: Process) -> int:
    from mpitrain.config import changed, load_run
    from mpitrain.config.shrink_sections import DistilConfig
    from mpitrain.run.saved_run import SavedRun
    from mpitrain.train.observers.log import plain_values

    def tell(path: str, values: Any, **more: Any) -> None:
        if started.comm.rank == 0:
            print(json.dumps({"path": path, **plain_values(values), **more}), flush=True)
    with guard.symmetric():
        if options.path and options.objective:
            raise UsageError("--objective is for a search (--trials); --path tells all metrics")
        config = changed(load_run(options.folder, options.arguments), distil=vars(DistilConfig()))
    with SavedRun.of_job(config, process) as started, started.paths(options.folder, options.step) as paths:
        from mpitrain.search.paths import best, measured, objectives_of, search
        elastic = paths.elastic
        if options.trials is None:
            with guard.symmetric():
                asked = [elastic.read(text) for text in options.path or ("largest", "smallest")]
            for path in asked:
                tell(elastic.write(path), measured(paths, path, ()))
            return 0
        with guard.symmetric():
            objectives = objectives_of(options.objective or ["accuracy"], paths)
        table = search(paths, options.trials, objectives, options.seed, parents=options.parents, tournament=options.tournament,
                       tell=lambda trial: tell(elastic.write(trial.values), trial.results[0]))
        for text, values in best(table, elastic):
            tell(text, values, front=True)
    return 0
