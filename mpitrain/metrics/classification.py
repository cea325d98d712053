"""Metrics of classes: labels against the classes of the largest outputs, or against probabilities.

Binary targets are those of two classes: an element is 1 where its probability is more than one half. What divides by a number of
rows that is 0 is 0, as in scikit-learn; a class that neither labels nor outputs have is not averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.metrics import LOWER, About, Metric, Seen, Values, fsum

AVERAGES = ("auto", "binary", "macro", "micro", "weighted")


class Confusion(Metric):
    """The number of labels of class i that the model takes for class j: row i, column j. With `normalise`, shares of row i.

    A part has a column more, of labels whose outputs are NaN: the value has it only where there are such.
    """

    kinds, adds, scalar, of_rows = ("classes", "binary"), "counts", False, False

    def __init__(self, normalise: bool = False):
        self.normalise = normalise

    def part(self, seen: Seen) -> Values:
        n = seen.n_classes
        column = np.where(seen.predicted < 0, n, seen.predicted)
        return np.bincount(seen.labels * (n + 1) + column, minlength=n * (n + 1)).reshape(n, n + 1)

    def value(self, total: Values) -> list[list[float]]:
        total = total if total[:, -1].any() else total[:, :-1]
        if not self.normalise:
            found: list[list[float]] = total.tolist()
            return found
        return [[count / max(sum(row), 1) for count in row] for row in total.tolist()]


class Accuracy(Confusion):
    """The share of labels that the model finds."""

    scalar, better = True, "higher"

    def __init__(self) -> None:
        super().__init__()

    def part(self, seen: Seen) -> Values:
        return np.array([(seen.labels == seen.predicted).sum(), len(seen.labels)])

    def value(self, total: Values) -> float:                 # type: ignore[override]
        return int(total[0]) / max(int(total[1]), 1)


class BalancedAccuracy(Confusion):
    """The mean over classes, those that labels have, of the share of their labels that the model finds."""

    scalar, better = True, "higher"

    def __init__(self) -> None:
        super().__init__()

    def value(self, total: Values) -> float:                 # type: ignore[override]
        found = [int(row[i]) / int(row.sum()) for i, row in enumerate(total) if row.sum()]
        return math.fsum(found) / len(found) if found else math.nan


class _Averaged(Confusion):
    """A number of each class, and their mean: of class `positive` alone ("binary"), of the classes that occur ("macro"), the same
    with the numbers of their labels as weights ("weighted"), or of all classes' counts ("micro"). "auto" is "binary" of two
    classes, "macro" of more."""

    scalar, better = True, "higher"

    def __init__(self, average: str = "auto", positive: int = 1):
        super().__init__()
        if average not in AVERAGES:
            raise ConfigError(f'an average is one of {", ".join(AVERAGES)}, not "{average}"')
        self.average, self.positive = average, positive

    @property
    def title(self) -> str:
        own = type(self).__name__.lower()
        return own if self.average in ("auto", "binary") else f"{own}_{self.average}"

    def refuse(self, about: About) -> None:
        n = about.n_classes if about.kind == "classes" else 2
        if n is None or self.average not in ("auto", "binary"):
            return
        if self.average == "binary" and n != 2:
            raise ConfigError(f'train.metrics: "{self.label}" has average = "binary", and the model has {n} classes; take '
                              '"macro", "micro" or "weighted"')
        if n == 2 and self.positive not in (0, 1):
            raise ConfigError(f'train.metrics: "{self.label}" has positive = {self.positive}, and the classes are 0 and 1')

    def value(self, total: Values) -> float:                 # type: ignore[override]
        right, labels, taken = total.diagonal(), total.sum(axis=1), total[:, :-1].sum(axis=0)
        if self.average == "binary" or (self.average == "auto" and len(total) == 2):
            i = self.positive
            return self.of(int(right[i]), int(labels[i]), int(taken[i]))
        if self.average == "micro":
            return self.of(int(right.sum()), int(labels.sum()), int(taken.sum()))
        there = [i for i in range(len(total)) if labels[i] or taken[i]]
        weights = [int(labels[i]) if self.average == "weighted" else 1 for i in there]
        if not sum(weights):
            return 0.0
        return math.fsum(w * self.of(int(right[i]), int(labels[i]), int(taken[i])) for w, i in zip(weights, there)) / sum(weights)

    def of(self, right: int, labels: int, taken: int) -> float:
        raise NotImplementedError


class Precision(_Averaged):
    """Of what the model takes for a class, the share that is it."""

    def of(self, right: int, labels: int, taken: int) -> float:
        return right / taken if taken else 0.0


class Recall(_Averaged):
    """Of the labels of a class, the share that the model finds."""

    def of(self, right: int, labels: int, taken: int) -> float:
        return right / labels if labels else 0.0


class F1(_Averaged):
    """The harmonic mean of precision and recall."""

    def of(self, right: int, labels: int, taken: int) -> float:
        return 2 * right / (labels + taken) if labels + taken else 0.0


class TopK(Metric):
    """The share of labels whose output is among the k largest. Of equal outputs those of higher classes come first, as in
    scikit-learn."""

    kinds, adds, better = ("classes",), "counts", "higher"

    def __init__(self, k: int = 5):
        if k < 1:
            raise ConfigError(f"the k of top_k is 1 or more, not {k}")
        self.k = k

    @property
    def title(self) -> str:
        return f"top_{self.k}"

    def refuse(self, about: About) -> None:
        if about.n_classes is not None and self.k > about.n_classes:
            raise ConfigError(f'train.metrics: "{self.label}" has k = {self.k}, and the model has {about.n_classes} classes; '
                              "take a smaller k")

    def part(self, seen: Seen) -> Values:
        return np.array([sum(map(self._found, seen.blocks())), len(seen.labels)], np.int64)

    def _found(self, seen: Seen) -> int:
        own = seen.given[np.arange(len(seen.labels)), seen.labels][:, None]
        later = np.arange(seen.given.shape[1]) > seen.labels[:, None]
        before = ((seen.given > own) | ((seen.given == own) & later)).sum(axis=1)
        return int(((before < self.k) & ~np.isnan(seen.given).any(axis=1)).sum())       # NaN is smaller than nothing.

    def value(self, total: Values) -> float:
        return int(total[0]) / max(int(total[1]), 1)


class LogLoss(Metric):
    """The mean of -log of the probability that the model gives the label, without the loss's weights and smoothing. Labels of
    binary targets may be shares."""

    kinds: ClassVar[Sequence[str]] = ("classes", "binary")
    better, of_rows = LOWER, False

    def refuse(self, about: About) -> None:
        if about.outputs_are == "scores":
            raise ConfigError(f'train.metrics: "{self.label}" is of probabilities, and train.loss has outputs that are scores; '
                              "leave it out")

    def part(self, seen: Seen) -> Values:
        if seen.classes:
            own = np.concatenate([np.zeros(0), *(block.log_probabilities[np.arange(len(block.labels)), block.labels]
                                                 for block in seen.blocks())])
        else:
            logs = seen.log_probabilities
            share = seen.targets.reshape(-1)                  # 0 times the log of 0 is 0.
            own = np.where(share < 1.0, (1.0 - share) * np.where(share < 1.0, logs[:, 0], 0.0), 0.0) \
                + np.where(share > 0.0, share * np.where(share > 0.0, logs[:, 1], 0.0), 0.0)
        return np.array([-own.sum(), len(own)])

    def value(self, total: Values) -> float:
        n = fsum(total[:, 1])
        return fsum(total[:, 0]) / n if n else math.nan


class Perplexity(LogLoss):
    """e to the log loss: the number of tokens among which the model is as unsure as if they were equally likely."""

    kinds: ClassVar[Sequence[str]] = ("classes",)

    def value(self, total: Values) -> float:
        try:
            return math.exp(super().value(total))
        except OverflowError:
            return math.inf


accuracy, balanced_accuracy, confusion = Accuracy, BalancedAccuracy, Confusion
precision, recall, f1 = Precision, Recall, F1
top_k, log_loss, perplexity = TopK, LogLoss, Perplexity
