"""Metrics of a model's outputs over the validation rows, by name: `train.metrics = ["mae", {name = "top_k", k = 5}]`.

A metric sees the rows in chunks, whose bounds depend on no rank, and gives an array for each: its `part`. What becomes of the
parts is one of three things, `adds`:

    "counts"     integers, of one shape: they are added up                     value gets the sum, int64
    "sums"       numbers, of one shape: they are kept apart, chunk by chunk    value gets them stacked, float64 (chunks, ...)
    "rows"       (n, k), numbers of each row: they stand behind each other     value gets all of them, float64 (N, k)

So `value` sees the same bits at any number of ranks, as far as the outputs are the same. All arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain.arguments import call_with
from mpitrain.backend import NO_CLASS, class_of_rows
from mpitrain.errors import ConfigError, nearest
from mpitrain.registry import Registry, named

__all__ = ["METRICS", "About", "Metric", "Seen", "find_metrics", "fsum"]

Values = NDArray[Any]
KEY = "train.metrics"
HIGHER, LOWER = "higher", "lower"
LOSS, ACCURACY = "loss", "accuracy"               # metrics that each evaluation has; the latter only of classes
BLOCK = 1 << 20                                   # numbers of outputs that are made float64 at a time
TAKEN = ("step", "epoch", "split", "seconds", "classes")      # what else is in the results of an evaluation


class About(NamedTuple):
    """What is known of the outputs before training: the loss's `kind` and what it says outputs are, the number of classes (None
    where targets are no labels), the shape of a row's output, the number of validation rows, and the number of rows that each
    class has among them (None where nobody has counted)."""

    kind: str
    outputs_are: str
    n_classes: int | None
    shape: tuple[int, ...]
    rows: int
    counts: Values | None = None


class Seen:
    """Some rows as metrics see them, float64 on the host.

    `outputs` and `targets` are those of the model, in the targets' units: data.target_transform is undone. Where targets are
    labels, rows are labels, those left out by ignore_index excepted. `outputs_are` is "logits", "probabilities" or "scores".
    """

    def __init__(self, outputs: Values, targets: Values, kind: str, outputs_are: str = "logits", ignore: int | None = None):
        self.kind, self.outputs_are = kind, outputs_are
        if kind == "classes":
            labels = targets.reshape(-1).astype(np.int64)
            kept = slice(None) if ignore is None else labels != ignore
            self.given, self.targets = outputs.reshape(len(labels), -1)[kept], labels[kept]
        else:
            self.given = outputs
            self.targets = targets if kind == "rows" else targets.reshape(outputs.shape).astype(np.float64)

    @cached_property
    def outputs(self) -> Values:
        """The same as `given`, the outputs in the model's precision, in float64. Of a large vocabulary that is a lot at once:
        `blocks` gives a few rows at a time."""
        return self.given.astype(np.float64)

    def blocks(self) -> Iterator[Seen]:
        """The rows of labels in their order, as many at a time as BLOCK numbers are."""
        size = max(1, BLOCK // max(self.given.shape[1], 1))
        for start in range(0, len(self.given), size):
            rows = slice(start, start + size)
            yield Seen(self.given[rows], self.targets[rows], self.kind, self.outputs_are)

    @property
    def classes(self) -> bool:
        return self.kind == "classes"

    @property
    def n_classes(self) -> int:
        """2 of binary targets, whatever their shape."""
        return int(self.given.shape[-1]) if self.classes else 2

    @cached_property
    def labels(self) -> Values:
        """The classes that are true (N,), int64; of binary targets, each element's: whether it is more than one half."""
        return self.targets if self.classes else (self.targets.reshape(-1) > 0.5).astype(np.int64)

    @cached_property
    def predicted(self) -> Values:
        """The classes of the largest outputs (N,), int64; of binary targets, whether the probability is more than one half;
        NO_CLASS where an output is NaN."""
        if self.classes:
            found: Values = class_of_rows(self.given)
            return found
        z = self.given.reshape(-1)
        return np.where(np.isnan(z), NO_CLASS, (z > (0.5 if self.outputs_are == "probabilities" else 0.0)).astype(np.int64))

    @cached_property
    def log_probabilities(self) -> Values:
        """(N, C), of classes and of binary targets (N, 2)."""
        with np.errstate(divide="ignore"):
            if self.classes:
                if self.outputs_are == "probabilities":
                    return np.asarray(np.log(self.outputs))
                shifted = self.outputs - self.outputs.max(axis=1, keepdims=True)
                return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
            z = self.outputs.reshape(-1)
            if self.outputs_are == "probabilities":
                return np.asarray(np.stack([np.log1p(-z), np.log(z)], axis=1))
            return np.asarray(np.stack([-np.logaddexp(0.0, z), -np.logaddexp(0.0, -z)], axis=1))


class Metric:
    """A number, or (`scalar` False) a table, of a model's outputs. `part` and `value` are what an author writes.

    `kinds` are the kinds of losses (`nn.Loss.kind`) whose outputs it can take; none: any. `better` is "higher" or "lower", or ""
    where neither is better: then no checkpoint is the best by it. `label` is its name in results.
    """

    kinds: ClassVar[Sequence[str]] = ()
    adds: ClassVar[str] = "sums"
    better = ""
    scalar = True
    label = ""
    compares = False         # True: it compares rows of a class with others, so `refuse` is told how many each class has.
    of_rows = True           # False: it is of single numbers, wherever they stand in their rows, which mesh.cp cuts.

    def part(self, seen: Seen) -> Any:
        """The array of a chunk of rows."""
        raise NotImplementedError

    def value(self, total: Values) -> Any:
        """The metric, of what became of all parts; NaN where it is not defined."""
        raise NotImplementedError

    def refuse(self, about: About) -> None:                  # noqa: B027  (most take anything of their kinds)
        """ConfigError where the metric, of a kind that it takes, would not be defined; before training."""

    @property
    def title(self) -> str:
        """The label in results, unless the user gives another."""
        return ""


def fsum(values: Values) -> float:
    """The exact sum, rounded once."""
    return math.fsum(values.reshape(-1).tolist())


METRICS: Registry[type[Metric]] = Registry("metric")
for _file, _names in {
        "regression": ("mae", "mse", "rmse", "r2", "relative_l2"),
        "classification": ("accuracy", "balanced_accuracy", "precision", "recall", "f1", "confusion", "top_k", "perplexity",
                           "log_loss"),
        "ranking": ("auc", "average_precision")}.items():
    for _name in _names:
        METRICS.register_later(_name, f"mpitrain.metrics.{_file}:{_name}")


def find_metrics(asked: Sequence[str | Mapping[str, Any]], folder: Path | None = None) -> list[Metric]:
    """The metrics that `train.metrics` asks for: names, or tables of a name and arguments; a table's `label` is for any.

    ConfigError for a name that is not there, arguments that are wrong, and two metrics of one label.
    """
    found: dict[str, Metric] = {LOSS: Metric()}
    for entry in asked:
        arguments = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        name, label = arguments.pop("name", None), arguments.pop("label", "")
        if not isinstance(name, str) or not isinstance(label, str):
            raise ConfigError(f'{KEY}: a table is a name, perhaps a label, and arguments, such as {{name = "top_k", k = 5}}, '
                              f"found {entry}")
        what = f'{KEY} "{name}"'
        made = call_with(METRICS.resolve(name, folder), arguments, what, KEY)
        if not isinstance(made, Metric) or made.adds not in ("counts", "sums", "rows"):
            raise ConfigError(f'{what} must give an mpitrain.metrics.Metric, whose adds is "counts", "sums" or "rows", found '
                              f"{named(made)}")
        made.label = label or made.title or name.rpartition(":")[2]
        if made.label in TAKEN or made.label == ACCURACY and name != ACCURACY:
            raise ConfigError(f'{what}: "{made.label}" is in results by itself; give the metric another label')
        if made.label in found:
            raise ConfigError(f'{what}: another metric is called "{made.label}" too; give one of them a label: '
                              f'{{name = "{name}", label = "..."}}')
        found[made.label] = made
    return [metric for label, metric in found.items() if label != LOSS]


def refuse_metrics(metrics: Sequence[Metric], about: About) -> None:
    """ConfigError for the first metric that such outputs do not have."""
    for metric in metrics:
        if metric.kinds and about.kind not in metric.kinds:
            raise ConfigError(f'{KEY}: "{metric.label}" is of {" or ".join(OF[kind] for kind in metric.kinds)}, and train.loss '
                              f"has {OF.get(about.kind, about.kind)}; {ADVICE.get(about.kind, 'leave it out')}")
        metric.refuse(about)


OF = {"classes": "labels of classes", "binary": "binary targets", "values": "numbers", "distribution": "probabilities of classes",
      "rows": "targets of its own form"}
ADVICE = {"classes": 'leave it out, or take one of classes, such as "f1"', "binary": 'leave it out, or take "auc" or "f1"',
          "values": 'leave it out, or take one of numbers, such as "mae"'}


def judged(key: str, asked: str, metrics: Sequence[Metric], kind: str, *, mode: str = "auto") -> tuple[str, bool]:
    """(name, is more better?) of the metric that decides, by `key` of a configuration.

    ConfigError where no evaluation gives it, or nobody knows which values of it are better.
    """
    ways = {LOSS: LOWER, **({ACCURACY: HIGHER} if kind == "classes" else {}),
            **{metric.label: metric.better for metric in metrics if metric.scalar}}
    if asked not in ways:
        raise ConfigError(f'{key} = "{asked}" is no metric of an evaluation{nearest(asked, ways)}; {KEY} adds more')
    better = {"min": LOWER, "max": HIGHER}.get(mode, ways[asked])
    if better not in (HIGHER, LOWER):
        raise ConfigError(f'{key} = "{asked}": the metric does not say which values are better; set `better` of it to "higher" '
                          'or "lower"')
    return asked, better == HIGHER
