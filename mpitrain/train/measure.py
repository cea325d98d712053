"""The metrics of `train.metrics` over all ranks: parts of chunks of the validation rows, put together to the same bits anywhere.

    evaluation          begin  [ see see see ... ]  add_up
    part of a chunk     in a slot of its own, chunk * ranks along cp + place there; counts are added up at once

A slot is written by one rank, and zeros are added to it, so nothing is rounded on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.arguments import call
from mpitrain.autograd import Tensor
from mpitrain.backend import asnumpy
from mpitrain.comm.face import Objects
from mpitrain.comm.job.guard import symmetric
from mpitrain.comm.job.together import on_first
from mpitrain.data import Dataset, Transforms
from mpitrain.errors import ConfigError
from mpitrain.metrics import About, Metric, Seen, refuse_metrics
from mpitrain.parallel.connect import ParallelContext
from mpitrain.registry import is_own, named
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.trial import Trial

BLOCK = 4096                 # labels that are counted at a time
LARGEST = 1 << 30            # bytes of a metric's parts on each rank


class Measure:
    """The metrics of one evaluation after the other; all ranks have one and call it alike."""

    def __init__(self, metrics: Sequence[Metric], loss: Any, transforms: Transforms, context: ParallelContext, n_chunks: int):
        self.metrics, self.context, self.n_chunks = list(metrics), context, n_chunks
        self.targets = transforms.targets
        self.kind, self.outputs_are = loss.kind, getattr(loss, "outputs_are", "logits")
        self.ignore = getattr(loss, "ignore_index", None)
        self.n_along, self.along = context.mesh.size("cp"), context.mesh.coordinate("cp")
        self.begin()

    def begin(self) -> None:
        """Forgets the last evaluation."""
        self.parts: list[dict[int, Any]] = [{} for _ in self.metrics]

    def see(self, chunk: int | None, output: Tensor, y: Any) -> None:
        """The outputs of a chunk, or of this rank's positions of its rows, and their targets, on ranks of the last stage; None:
        of a chunk that another rank counts. It communicates where ranks have parts of the outputs."""
        whole = self.context.whole_outputs(output.array)
        if chunk is None or not self.context.counts:
            return
        seen, slot = self._seen(asnumpy(whole), y), chunk * self.n_along + self.along
        for metric, parts in zip(self.metrics, self.parts):
            part = part_of(metric, seen)
            if metric.adds != "counts":
                parts[slot] = part
            elif parts and np.shape(parts[0]) == part.shape:
                parts[0] += part
            else:
                parts[len(parts)] = part                      # A second shape is refused when they are added up.

    def add_up(self) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics that are numbers, and those that are not. It communicates."""
        own = [sorted({np.shape(part) for part in parts.values()}) for parts in self.parts]
        shapes = self.context.control.gather_objects(own)
        numbers, tables = dict[str, float](), dict[str, Any]()
        for i, metric in enumerate(self.metrics):
            found = [tuple(shape) for of_rank in shapes for shape in of_rank[i]]
            with symmetric():
                most = common(metric, found, self.n_chunks * self.n_along)
            total = self._total(metric, self.parts[i], most)
            with symmetric():
                (numbers if metric.scalar else tables)[metric.label] = value_of(metric, total)
        self.begin()
        return numbers, tables

    def _seen(self, outputs: Any, y: Any) -> Seen:
        if self.targets is not None and self.kind == "values":
            outputs = self.targets.inverse(outputs.reshape(y.shape).astype(np.float64))
            y = self.targets.inverse(y.astype(np.float64))
        return Seen(outputs, y, self.kind, self.outputs_are, self.ignore)

    def _total(self, metric: Metric, parts: dict[int, Any], most: tuple[int, ...]) -> Any:
        """The parts of all ranks as `Metric.value` gets them; none is larger than `most`."""
        n = self.n_chunks * self.n_along
        counted, control = metric.adds == "counts", self.context.control
        table = np.zeros(most if counted else (n, *most), np.int64 if counted else np.float64)
        rows = np.zeros(n, np.int64)
        for slot, part in parts.items():
            if counted:
                table[...] = part
            elif metric.adds == "sums":
                table[slot] = part
            else:
                table[slot, :len(part)], rows[slot] = part, len(part)
        control.allreduce(table.reshape(-1), name="metric")
        if metric.adds != "rows":
            return table
        control.allreduce(rows, name="rows of a metric")
        return table[np.arange(most[0]) < rows[:, None]]


def part_of(metric: Metric, seen: Seen) -> Any:
    """A metric's part of some rows, an array. ConfigError where it fails, or gives something else."""
    what = f'the metric "{metric.label}"'
    part = np.asarray(call(metric.part, what, {}, seen))
    wanted = "iub" if metric.adds == "counts" else "iubf"
    if part.dtype.kind not in wanted or (metric.adds == "rows" and part.ndim != 2):
        form = {"counts": "integers", "sums": "numbers", "rows": "numbers, (rows, columns)"}[metric.adds]
        raise ConfigError(f"{what} adds {metric.adds}, so its part must be an array of {form}, found {part.dtype} of shape "
                          f"{part.shape}")
    return part.astype(np.int64 if metric.adds == "counts" else np.float64)


def value_of(metric: Metric, total: Any) -> Any:
    """A metric's value: a number, or a table that JSON holds. ConfigError where it fails, or gives something else."""
    what = f'the metric "{metric.label}"'
    value = call(metric.value, what, {}, total)
    if not metric.scalar:
        try:
            return plain_table(value)
        except TypeError as error:
            raise ConfigError(f"{what} must give a table of numbers, texts, lists and dicts, found {error}; change it") from None
    if not (hasattr(value, "__float__") and np.ndim(value) == 0):
        raise ConfigError(f"{what} must give a number, found {named(value)}; set scalar = False in it if it is a table")
    return float(value)


def plain_table(value: Any) -> Any:
    """Arrays as lists, NumPy's numbers as Python's, NaN and the infinities as None. TypeError for what JSON does not hold."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain_table(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_table(one) for one in value]
    if not isinstance(value, int | float | str | None):
        raise TypeError(named(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def common(metric: Metric, shapes: Sequence[tuple[int, ...]], slots: int) -> tuple[int, ...]:
    """The shape that parts have, of rows the largest. ConfigError where they differ, or where all take too much memory."""
    compared = [shape[1:] for shape in shapes] if metric.adds == "rows" else shapes
    if len(set(compared)) > 1:
        raise ConfigError(f'the metric "{metric.label}" gave parts of shapes {shapes[0]} and '
                          f"{next(s for s in shapes if s != shapes[0])}; all must have one")
    most = max(shapes)
    if metric.adds != "counts" and (nbytes := 8 * slots * int(np.prod(most))) > LARGEST:
        raise ConfigError(f'the metric "{metric.label}" keeps {nbytes >> 20} MiB of its parts on each rank, and {LARGEST >> 20} '
                          "are the most; take fewer validation rows, or leave it out")
    return most


def refuse_unfit(metrics: Sequence[Metric], loss: Any, tried: Trial, inputs: Inputs, control: Objects, *, cp: int) -> None:
    """ConfigError, before training and on all ranks alike, for the first metric that is not defined for the outputs, the loss and
    the validation rows, each of which `cp` ranks share. It communicates where a metric wants each class to be there."""
    counts = None
    if any(metric.compares for metric in metrics) and loss.kind in ("classes", "binary"):
        counts = on_first(control, lambda: class_counts(inputs, tried.n_classes, tried.ignore))
    with symmetric():
        about = About(loss.kind, getattr(loss, "outputs_are", "logits"), tried.n_classes, tried.shape[1:],
                      len(inputs.validation_rows), None if counts is None else np.array(counts))
        refuse_metrics(metrics, about)
        refuse_cut_rows(metrics, loss.kind, cp)
        for metric in metrics:
            if is_own(metric) and loss.kind != "rows":
                try_metric(metric, about)


def refuse_cut_rows(metrics: Sequence[Metric], kind: str, cp: int) -> None:
    """ConfigError for the first metric of whole rows where ranks have parts of them. Of classes a row is a label."""
    for metric in metrics:
        if cp > 1 and kind != "classes" and metric.of_rows:
            raise ConfigError(f'train.metrics: "{metric.label}" is of whole rows, and mesh.cp = {cp} cuts them; set mesh.cp = 1, '
                              "or leave it out")


def try_metric(metric: Metric, about: About) -> None:
    """A user's metric, of made-up rows: ConfigError where it fails, or where its value is no number."""
    outputs = np.linspace(0.1, 0.9, 4 * int(np.prod(about.shape)), dtype=np.float64).reshape(4, *about.shape)
    targets = np.arange(4 * int(np.prod(about.shape[:-1]))).reshape(4, *about.shape[:-1]) % (about.n_classes or 2) \
        if about.kind == "classes" else np.round(outputs)
    part = part_of(metric, Seen(outputs, targets, about.kind, about.outputs_are))
    value_of(metric, part[None] if metric.adds == "sums" else part)


def class_counts(inputs: Inputs, n_classes: int | None, ignore: int | None) -> list[list[int]] | None:
    """How many validation rows each class has; of binary targets [zeros, ones] of each of a row's. None where they cannot be
    known."""
    source = inputs.training if inputs.validation is None else inputs.validation
    if not isinstance(source, Dataset) or source.y is None:
        return None
    total = None
    for start in range(0, len(inputs.validation_rows), BLOCK):
        y = source.read_field(source.y, np.asarray(inputs.validation_rows[start:start + BLOCK], np.int64))
        if n_classes is not None:
            labels = y[y != ignore] if ignore is not None else y.reshape(-1)
            found = np.bincount(labels.astype(np.int64), minlength=n_classes)[None]
        else:
            ones = (y.reshape(len(y), -1) > 0.5).sum(axis=0)
            found = np.stack([len(y) - ones, ones], axis=1)
        total = found if total is None else total + found
    return None if total is None else [list(map(int, row)) for row in total]
