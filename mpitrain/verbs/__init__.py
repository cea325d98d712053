"""The verbs of the command line, a file each: `HELP`, `add_arguments(parser)`, and `run(options, process)`, its exit status.

A verb imports its dependencies when it runs: all verbs are imported for each command.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.train.build.saved import SavedModel


class Parser(ArgumentParser):
    """A parser whose errors are ours, one line each."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")


def add_made(parser: ArgumentParser, of: str = "a run folder") -> None:
    """The arguments of a verb that makes a run of a run: `options.folder`, `arguments`, `step`, `out` and `overwrite`."""
    parser.add_argument("folder", type=Path, metavar="RUN", help=of)
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN2", help="the folder of the new run")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in RUN2")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")
    add_step(parser)


CALIBRATE = 512                                   # training rows


def add_calibrate(parser: ArgumentParser, use: str) -> None:
    """``--calibrate ROWS``: `options.calibrate`, a number of training rows, or None: see `calibrate_rows`."""
    parser.add_argument("--calibrate", type=rows, metavar="ROWS", help=f"training rows {use} (default: {CALIBRATE})")


def calibrate_rows(options: Namespace, used: bool, what: str) -> int:
    """How many training rows are looked at. UsageError where a number was given, and `what` looks at none."""
    if options.calibrate is not None and not used:
        raise UsageError(f"--calibrate {options.calibrate} does nothing: {what} looks at no training rows; leave it out")
    return CALIBRATE if options.calibrate is None else int(options.calibrate)


def rows(text: str) -> int:
    """A number of rows, of an argument."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"must be at least 1 row, found {text}")
    return int(text)


def is_first() -> bool:
    """Whether this process is to do what a verb does in one: rank 0 of those that a launcher started. The others would write the
    same files beside it."""
    from mpitrain.comm.job.start import launched_rank
    return launched_rank()[0] == 0


def refuse_made(saved: SavedModel, what: str) -> None:
    """UsageError where a run's weights are in few bits, are rounded or go with adapters, and it cannot be cut, or factored:
    `what`."""
    from mpitrain.config.shrinking import floats
    from mpitrain.train.build.adapted import refuse_adapters
    if saved.config.model.formats:
        raise UsageError(f"the run is in few bits (model.formats), and cannot be {what}; take the run it was made of, and "
                         "quantize what comes of it")
    if how := saved.config.shrink.quantize:
        raise UsageError(f'the run computes with its weights rounded to "{how}" (shrink.quantize), and its floats can be {what}: '
                         f"give {floats(saved.config.shrink)}, and train what comes of it with shrink.quantize again")
    refuse_adapters(saved)


def refuse_supernet(saved: SavedModel, what: str) -> None:
    """UsageError for a model of many paths, of which one would be cut, factored or quantized: `what`."""
    if saved.model.elastic is not None:
        raise UsageError(f"the run is a supernet, whose paths share their weights, and cannot be {what}; cut a path out of it "
                         "first, which is a run of its own: mpitrain cut RUN --path smallest --out RUN2")


def first_rows(saved: SavedModel, rows: int, *, tokens: int | None = None) -> Any:
    """The first training samples, as the model takes them, to record it with; of text no more than so many `tokens`."""
    import numpy as np

    from mpitrain.backend import CPU
    from mpitrain.data.columns import Columns
    from mpitrain.parallel.pipeline.feed import Feed
    from mpitrain.plan.prepare import open_data
    inputs = open_data(saved.config)
    x, _ = inputs.reader(saved.transforms).read(np.asarray(inputs.train_rows[:rows], np.int64))
    assert saved.model.storage is not None
    dtype = saved.model.storage.dtype
    if isinstance(x, Columns):
        return Feed(CPU, dtype).tensors(x)
    if inputs.tokens:
        return x if tokens is None else x[:max(1, tokens // x.shape[1])]
    return np.asarray(x, dtype)


def add_step(parser: ArgumentParser) -> None:
    """``--step N`` and ``--best``, which choose a checkpoint: `options.step` is a number, "best", or None for the newest."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=_step, metavar="N", help="the checkpoint of this step (default: the newest)")
    which.add_argument("--best", dest="step", action="store_const", const="best",
                       help="the checkpoint with the lowest validation loss, or the best checkpoint.best_metric")


def add_language_model(parser: ArgumentParser) -> None:
    """How a saved language model is put to work, and which checkpoint of it."""
    parser.add_argument("--slots", type=int, default=8, metavar="N", help="texts at a time, on each copy of the model (8)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                        help="cpu (default): the same text in any company; gpu: in the run's precision")
    parser.add_argument("--vocabulary", type=Path, metavar="FOLDER",
                        help="the table of tokens: vocab.json and merges.txt, or a data folder (default: the run's data)")
    add_step(parser)
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"expected the number of a step, found {text!r}")
    return int(text)
