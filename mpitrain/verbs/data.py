"""`mpitrain data`: import, look at and verify HDF5 shards."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain.comm.job.guard import Process

HELP = "import data, look at them, verify their checksums"


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    importer = verbs.add_parser("import", help="write HDF5 shards from other files")
    kinds = importer.add_subparsers(dest="importer", required=True, metavar="KIND")
    for name, words in (("text", "a text file, by characters or bytes"), ("idx", "IDX images and labels (MNIST), also .gz"),
                        ("npz", "NumPy .npz, or .npy with --targets"), ("csv", "a table with a header or without"),
                        ("ts", "series with classes, as the UCR archive has them"),
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
            for flag, words in (("--categories", "columns of words, which become codes; commas between"),
                                ("--integers", "columns of whole numbers from 0 up that are codes")):
                kind.add_argument(flag, type=lambda text: text.split(","), default=[], metavar="A,B", help=words)
            kind.add_argument("--by-name", action="store_true", help="codes are an input of their own: numbers and codes")
            kind.add_argument("--kind", choices=("classification", "regression"))
    for name, words in (("info", "kind, shapes, storage"), ("index", "write checksums beside a folder's HDF5 files"),
                        ("verify", "read everything and compare every checksum")):
        verb = verbs.add_parser(name, help=words)
        verb.add_argument("path", type=Path)
        verb.add_argument("--x", help="dataset of the inputs")
        verb.add_argument("--y", help="dataset of the targets")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.data import importers, report
    if options.data_verb == "info":
        print("\n".join(report.info(options.path, x=options.x, y=options.y)))
        return 0
    if options.data_verb == "index":
        from mpitrain.data.index import index
        rows, checksums = index(options.path, x=options.x, y=options.y)
        print(f"{options.path}: {rows:,} rows, {checksums:,} checksums in {options.path / 'manifest.json'}")
        return 0
    if options.data_verb == "verify":
        rows, checksums = report.verify(options.path, x=options.x, y=options.y)
        print(f"{options.path}: {rows:,} rows read, {checksums:,} checksums right")
        return 0
    taken = ("verb", "data_verb", "importer", "source", "out")
    flags = {name: value for name, value in vars(options).items() if name not in taken}
    getattr(importers, f"import_{options.importer}")(options.source, options.out, **flags)
    print("\n".join(report.info(options.out)))
    return 0
