"""Metrics of the order of scores. All ranks gather the scores of all rows, and count pairs of them in integers, ties exactly.

Each rank keeps 16 C bytes for each label then, of C classes, and 16 of two. `MOST` bytes are the bound.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.metrics import About, Metric, Seen, Values

MOST = 1 << 30               # bytes of all rows' scores, on each rank


class _Ranking(Metric):
    """Of two classes, and of binary targets of one number a row, a number of the scores of class 1; of more classes the mean of
    each against the others, and of several binary targets the mean of these."""

    kinds, adds, better = ("classes", "binary"), "rows", "higher"
    compares = True

    def refuse(self, about: About) -> None:
        columns = 2 * about.n_classes if about.n_classes and about.n_classes > 2 else 2
        labels = math.prod(about.shape[:-1] if about.kind == "classes" else about.shape)
        if (nbytes := 8 * columns * labels * about.rows) > MOST:
            raise ConfigError(f'train.metrics: "{self.label}" gathers the scores of all validation rows, {nbytes >> 20} MiB on '
                              f"each rank, and {MOST >> 20} are the most; take fewer rows (data.validation), or leave it out")
        for i, counts in enumerate(about.counts if about.counts is not None else ()):
            if not counts.all():
                whose = "no row of class" if about.kind == "classes" else f"in column {i} only one class, none of class"
                raise ConfigError(f'train.metrics: "{self.label}" compares the scores of each class with those of others, and '
                                  f'the validation rows have {whose} {int(np.flatnonzero(counts == 0)[0])}; take others, such as '
                                  'data.validation = "stratified:1/5", or leave it out')

    def part(self, seen: Seen) -> Values:
        """(n, 2 C): the scores of each class, and whether it is the label."""
        if not seen.classes:
            scores = seen.outputs.reshape(len(seen.outputs), -1)
            return np.concatenate([scores, seen.targets.reshape(scores.shape) > 0.5], axis=1)
        scores = seen.outputs
        if scores.shape[1] == 2:                              # The difference of logits keeps what probabilities round to 1.
            scores = scores[:, 1:] if seen.outputs_are == "probabilities" else scores[:, 1:] - scores[:, :1]
            return np.concatenate([scores, seen.labels[:, None] == 1], axis=1)
        if seen.outputs_are == "logits":
            scores = np.exp(seen.log_probabilities)
        return np.concatenate([scores, seen.labels[:, None] == np.arange(scores.shape[1])], axis=1)

    def value(self, total: Values) -> float:
        n = total.shape[1] // 2
        found = [self._of_column(total[:, c], total[:, n + c] == 1) for c in range(n)]
        return math.fsum(found) / n if n else math.nan

    def _of_column(self, scores: Values, yes: Values) -> float:
        return math.nan if yes.all() or not yes.any() or np.isnan(scores).any() else self.of(scores, yes)

    def of(self, scores: Values, yes: Values) -> float:
        raise NotImplementedError


def steps(scores: Values, yes: Values) -> tuple[Values, Values]:
    """The numbers of rows with `yes`, and of others, at each of the different scores, from the highest down, int64."""
    _, where = np.unique(-scores, return_inverse=True)
    n = int(where.max()) + 1
    return np.bincount(where[yes], minlength=n), np.bincount(where[~yes], minlength=n)


class AUC(_Ranking):
    """The area under the receiver operating characteristic: the share of pairs, of a row of the class and another, whose first
    has the higher score; a tie counts half (Hanley and McNeil, 1982)."""

    def of(self, scores: Values, yes: Values) -> float:
        own, others = steps(scores, yes)
        above = np.cumsum(own) - own
        twice = sum(int(n) * (2 * int(a) + int(y)) for n, a, y in zip(others, above, own) if n)
        return float(Fraction(twice, 2 * int(own.sum()) * int(others.sum())))


class AveragePrecision(_Ranking):
    """The mean over the rows of the class of the precision at their score: of all rows with it or a higher one, the share that is
    of the class."""

    def of(self, scores: Values, yes: Values) -> float:
        own, others = steps(scores, yes)
        right, taken = np.cumsum(own), np.cumsum(own + others)
        found = [int(n) * int(r) / int(t) for n, r, t in zip(own, right, taken) if n]
        return math.fsum(found) / int(own.sum())


auc, average_precision = AUC, AveragePrecision
