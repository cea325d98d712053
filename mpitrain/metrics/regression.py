"""Metrics of numbers, in the targets' units. A row's targets may have any shape; its elements count alike."""

from __future__ import annotations

import math

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.metrics import LOWER, Metric, Seen, Values, fsum

UNIFORM, VARIANCE = "uniform", "variance"


class _Errors(Metric):
    """The mean of something over all elements."""

    kinds, better, of_rows = ("values",), LOWER, False

    def part(self, seen: Seen) -> Values:
        errors = self.of(seen.outputs - seen.targets)
        return np.array([errors.sum(), errors.size])

    def of(self, gap: Values) -> Values:
        raise NotImplementedError

    def value(self, total: Values) -> float:
        n = fsum(total[:, 1])
        return fsum(total[:, 0]) / n if n else math.nan


class MeanAbsoluteError(_Errors):
    """The mean size of errors."""

    def of(self, gap: Values) -> Values:
        return np.abs(gap)


class MeanSquaredError(_Errors):
    """The mean square of errors."""

    def of(self, gap: Values) -> Values:
        return gap * gap


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean square of errors."""

    def value(self, total: Values) -> float:
        return math.sqrt(super().value(total))


class R2(Metric):
    """1 - the sum of squared errors / the sum of squared differences from the mean target: of each element of a row, then the
    mean of these (`outputs` "uniform"), or that with the targets' variances as weights ("variance").

    Each chunk gives its number of rows, its means and its sums of squares about them, which are merged (Chan, Golub and LeVeque,
    1979): nothing is lost where the mean is large. An element that never changes counts 1 where it is met, else 0.
    """

    kinds, better = ("values",), "higher"

    def __init__(self, outputs: str = UNIFORM):
        if outputs not in (UNIFORM, VARIANCE):
            raise ConfigError(f'the outputs of r2 are "{UNIFORM}" or "{VARIANCE}", not "{outputs}"')
        self.outputs = outputs

    def part(self, seen: Seen) -> Values:
        targets = seen.targets.reshape(len(seen.targets), -1)
        gap = seen.outputs.reshape(targets.shape) - targets
        same = (targets == targets[:1]).all(axis=0)           # Their mean may round to another number: ten times 0.1 does.
        mean = np.where(same, targets[:1].sum(axis=0), targets.mean(axis=0))
        return np.stack([np.full(mean.shape, float(len(targets))), mean, ((targets - mean) ** 2).sum(axis=0),
                         (gap * gap).sum(axis=0)])

    def value(self, total: Values) -> float:
        used = total[total[:, 0, 0] > 0]
        n = fsum(used[:, 0, 0])
        if n < 2:
            return math.nan                                   # as of one row, which has no variance
        errors, spread = [], []
        for counts, means, squares, own in used.transpose(2, 1, 0):
            mean = float(means[0]) if (means == means[0]).all() else fsum(counts * means) / n
            spread.append(math.fsum([*squares.tolist(), *(counts * (means - mean) ** 2).tolist()]))
            errors.append(fsum(own))
        found = [1.0 - e / s if s else float(e == 0.0) if e < math.inf else -e for e, s in zip(errors, spread)]
        if self.outputs == VARIANCE and any(spread):
            return math.fsum(r * s for r, s in zip(found, spread)) / math.fsum(spread)
        return math.fsum(found) / len(found)


class RelativeL2(Metric):
    """The mean over rows of the norm of the error / the norm of the target, as operators on fields are compared (Li et al.,
    2021). A row of zeros gives infinity, unless it is met."""

    kinds, better = ("values",), LOWER

    def part(self, seen: Seen) -> Values:
        targets = seen.targets.reshape(len(seen.targets), -1)
        errors = np.linalg.norm(seen.outputs.reshape(targets.shape) - targets, axis=1)
        norms = np.linalg.norm(targets, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(errors == 0.0, 0.0, errors / norms)
        return np.array([ratios.sum(), len(ratios)])

    def value(self, total: Values) -> float:
        n = fsum(total[:, 1])
        return fsum(total[:, 0]) / n if n else math.nan


mae, mse, rmse, r2, relative_l2 = MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError, R2, RelativeL2
