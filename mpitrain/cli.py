"""The command line: verbs and flags, no logic of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpitrain.comm.job import guard, signals
from mpitrain.config import Config, load_config
from mpitrain.errors import MissingError, UsageError

EPILOG = """examples:
  mpirun -n 2 python -m mpitrain train                          the built-in digits run
  mpirun -n 8 python -m mpitrain train gpt.toml optimizer.lr=3e-4
  mpirun -n 8 python -m mpitrain train gpt.toml --resume auto
  mpirun -n 4 python -m mpitrain evaluate runs/gpt
  python -m mpitrain inspect runs/gpt
  python -m mpitrain data import text corpus.txt --out corpus
  mpirun -n 2 python -m mpitrain bench allreduce --sizes 64K,1M,16M
  python -m mpitrain bench train --models mlp,gpt-nano
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="mpitrain", description="Train neural networks over MPI.", epilog=EPILOG,
                 formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = verbs.add_parser("train", help="train as a TOML file says (without one: the built-in digits run)")
    train.add_argument("arguments", nargs="*", metavar="run.toml section.key=value", help="the run and what overrides it")
    train.add_argument("--resume", nargs="?", const="latest", metavar="auto|FOLDER",
                       help="continue the run in run.out; auto: or start it where there is none; FOLDER: the run in there")
    train.add_argument("--overwrite", action="store_true", help="delete the run that is in run.out (only what runs write)")
    train.add_argument("--profile", action="store_true", help="write trace.json: the last steps of all ranks")
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")
    train.add_argument("--traceback", action="store_true", help="print Python tracebacks too")

    evaluate = verbs.add_parser("evaluate", help="the metrics of a run's newest checkpoint")
    evaluate.add_argument("folder", type=Path)
    evaluate.add_argument("arguments", nargs="*", metavar="section.key=value")
    evaluate.add_argument("--traceback", action="store_true", help="print Python tracebacks too")

    inspect = verbs.add_parser("inspect", help="what is in a run, a configuration, a data file; needs no MPI")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("arguments", nargs="*", metavar="section.key=value")
    inspect.add_argument("--ranks", type=int, default=1, help="draw the placement for so many ranks")

    _data_verbs(verbs.add_parser("data", help="import data, look at them, verify their checksums"))
    _bench_verbs(verbs.add_parser("bench", help="measure this machine: training steps, the exchange between ranks"))
    return top


def _data_verbs(data: argparse.ArgumentParser) -> None:
    verbs = data.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    importer = verbs.add_parser("import", help="write HDF5 shards from other files")
    kinds = importer.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, words in (("text", "a text file, by characters or bytes"), ("idx", "IDX images and labels (MNIST), also .gz"),
                        ("npz", "NumPy .npz, or .npy with --targets"), ("csv", "a table with a header or without"),
                        ("images", "a folder with one folder of images a class")):
        kind = kinds.add_parser(name, help=words)
        kind.add_argument("source", type=Path)
        kind.add_argument("--out", type=Path, required=True, help="the folder to write")
        kind.add_argument("--overwrite", action="store_true", help="replace shards that are there")
        if name == "text":
            kind.add_argument("--level", choices=("char", "byte"), default="char")
        if name == "idx":
            kind.add_argument("--labels", type=Path, help="the labels' file, where its name does not tell")
        if name == "npz":
            kind.add_argument("--targets", type=Path, help="a .npy file of targets")
            kind.add_argument("--x", help="name of the inputs in the .npz")
            kind.add_argument("--y", help="name of the targets in the .npz")
        if name == "csv":
            kind.add_argument("--label", default="-1", help="column of the target: its name, or its number (default: the last)")
            kind.add_argument("--kind", dest="target_kind", choices=("classification", "regression"))
    for name, words in (("info", "kind, shapes, storage"), ("verify", "read everything and compare every checksum")):
        verb = verbs.add_parser(name, help=words)
        verb.add_argument("path", type=Path)
        verb.add_argument("--x", help="dataset of the inputs")
        verb.add_argument("--y", help="dataset of the targets")


def _bench_verbs(bench: argparse.ArgumentParser) -> None:
    verbs = bench.add_subparsers(dest="bench_verb", required=True, metavar="VERB")
    allreduce = verbs.add_parser("allreduce", help="our all-reduce algorithms beside MPI_Allreduce")
    allreduce.add_argument("--sizes", default="8,4K,64K,1M,16M", help="bytes, with commas (default: %(default)s)")
    allreduce.add_argument("--algorithms", help="names with commas, or your own package.module:name (default: all there are)")
    allreduce.add_argument("--dtypes", default="float32", help="float32, float64 (default: %(default)s)")
    allreduce.add_argument("--wire", metavar="TYPE",
                           help="bfloat16 or float16: messages of such numbers, beside the same algorithm with float32")
    fit = verbs.add_parser("fit", help="alpha, beta and gamma of this machine, and predicted beside measured times")
    fit.add_argument("--sizes", help="bytes, with commas (default: 1 KiB to 8 MiB, doubling)")
    exchange = verbs.add_parser("exchange", help="gradient sum, AdamW, parameters visible to all; beside MPI_Allreduce + AdamW")
    exchange.add_argument("--parameters", type=int, default=10_000_000, help="how many (default: %(default)s)")
    exchange.add_argument("--bucket-bytes", default="4M", help="how much travels together (default: %(default)s)")
    for verb in (allreduce, fit, exchange):
        verb.add_argument("--pairs", type=int, default=25, help="how often each is timed, in turns (default: %(default)s)")
    train = verbs.add_parser("train", help="steps of well-known models, made-up data: seconds, share of the core's peak, memory")
    train.add_argument("--models", help="names with commas (default: all: mlp, lenet, resnet20, gpt-nano, gpt-baby, gpt2)")
    train.add_argument("--precision", default="float32", help="as train.precision; several with commas (default: %(default)s)")
    train.add_argument("--steps", type=int, default=20, help="how many are timed (default: %(default)s)")
    memory = verbs.add_parser("memory", help="memory of a rank, predicted and measured, for well-known models")
    memory.add_argument("--models", default="mlp,lenet,resnet20,gpt-nano", help="with commas (default: %(default)s)")
    pipeline = verbs.add_parser("pipeline", help="idle time of a pipeline's stages, one a rank: measured, simulated, by formula")
    pipeline.add_argument("--schedules", default="gpipe,1f1b,interleaved,zb_h1", help="with commas (default: %(default)s)")
    for flag, number, words in (("--micro-batches", 4, "of a step"), ("--chunks", 2, "of a stage, where interleaved"),
                                ("--blocks", 8, "of the model, all equal"), ("--width", 256, "of a block; 4 times that inside"),
                                ("--rows", 256, "of a micro-batch"), ("--steps", 20, "how many are timed, in turns")):
        pipeline.add_argument(flag, type=int, default=number, help=f"{words} (default: %(default)s)")
    for verb in (allreduce, fit, exchange, train, memory, pipeline):
        verb.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line, too")
        verb.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what goes wrong is raised, and `comm.job.guard` turns it into a line and an exit status."""
    with guard.symmetric():
        options, rest = parser().parse_known_args(arguments)
        unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "arguments")]
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]} (try: mpitrain {options.verb} --help)")
        if rest:                                  # overrides that stand after a flag
            options.arguments = [*options.arguments, *rest]
    if options.verb == "data":
        return _data(options)
    if options.verb == "bench":
        return _bench(options)
    if options.verb == "inspect":
        from mpitrain.plan.inspect import inspect
        for line in inspect(options.path, options.arguments, ranks=options.ranks):
            print(line)
        return 0
    if options.verb == "evaluate":
        from mpitrain.train.run import evaluate
        with guard.symmetric():
            config = _config_of(options.folder, options.arguments)
        return evaluate(config, options.folder)
    return _train(options)


def _train(options: argparse.Namespace) -> int:
    from mpitrain.train.run import train
    with guard.symmetric():
        arguments, resume = options.arguments, options.resume
        if resume and ("=" in resume or resume.endswith(".toml")):          # what followed --resume was not meant for it
            arguments, resume = [*arguments, resume], "latest"
        files = [a for a in arguments if "=" not in a]
        overrides = [a for a in arguments if "=" in a]
        if len(files) > 1:
            raise UsageError(f"one configuration file, found {len(files)}: {' '.join(files)}")
        if resume not in (None, "latest", "auto"):
            files = files or [str(Path(resume) / "config.toml")]
            overrides = [*overrides, f"run.out={resume}"]
            resume = "latest"
        path = Path(files[0]) if files else None
        config = load_config(path, overrides)
    return train(config, resume=resume, overwrite=options.overwrite, quiet=options.quiet, profile=options.profile)


def _config_of(folder: Path, overrides: list[str]) -> Config:
    """The configuration a run was started with."""
    if not (folder / "config.toml").is_file():
        raise MissingError("expected a run folder with a config.toml", file=folder)
    return load_config(folder / "config.toml", overrides)


def _data(options: argparse.Namespace) -> int:
    from mpitrain.data import importers, report
    if options.data_verb == "info":
        print("\n".join(report.info(options.path, x=options.x, y=options.y)))
        return 0
    if options.data_verb == "verify":
        rows, checksums = report.verify(options.path, x=options.x, y=options.y)
        print(f"{options.path}: {rows:,} rows read, {checksums:,} checksums right")
        return 0
    common = {"overwrite": options.overwrite}
    if options.kind == "text":
        importers.import_text(options.source, options.out, level=options.level, **common)
    elif options.kind == "idx":
        importers.import_idx(options.source, options.out, labels=options.labels, **common)
    elif options.kind == "npz":
        importers.import_npz(options.source, options.out, targets=options.targets, x=options.x, y=options.y, **common)
    elif options.kind == "csv":
        importers.import_csv(options.source, options.out, label=options.label, kind=options.target_kind, **common)
    else:
        importers.import_images(options.source, options.out, **common)
    print("\n".join(report.info(options.out)))
    return 0


def _bench(options: argparse.Namespace) -> int:
    signals.ignore()                              # before what takes a while to import
    from mpitrain.bench import command
    flags = {name: value for name, value in vars(options).items() if name not in ("verb", "bench_verb", "traceback")}
    return command.VERBS[options.bench_verb](**flags)
