r"""Samples of time series: windows of `length` steps, and the values of the `horizon` steps that follow.

    step      0 1 2 3 4 5 6 7 8 9 | 10 11 12          length 4, horizon 2, stride 3, cut at 10
    training  x x x x y y                             whole windows before the cut
                    x x x x y y
    validation            x x x x | y  y              targets behind the cut; what they are told from may lie before it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.data.checks import check_finite
from mpitrain.data.shards import Dataset, Rows, Values
from mpitrain.data.split import share_of
from mpitrain.errors import ConfigError, DataError

KIND = "series"
BLOCK = 4096                     # steps that statistics are taken of at a time


@dataclass(frozen=True)
class Windows:
    """How series are cut: `targets` are the columns to predict, all where there are none."""

    length: int
    horizon: int
    stride: int = 1
    targets: tuple[int, ...] = ()


class WindowField:
    """What is read of a window: rows of `shape` (length, features)."""

    def __init__(self, dataset: Any, shape: tuple[int, ...]):
        self.name, self.dtype, self.shape = dataset.name, dataset.dtype, shape


class SeriesWindows:
    """Windows over the series of a dataset, none of which crosses from one series to the next.

    Rows of (features,) or of one number are steps, and each shard is a series; rows of (steps, features) are series. Sample i is
    x (length, features) and y (horizon, targets). The targets of each window lie in the steps first .. stop of its series, and so
    do its inputs, where `inside`; `cuts` has (first, stop) of each series. With a horizon of 0 there are no targets.
    """

    kind = KIND
    classes = vocabulary = None

    def __init__(self, dataset: Dataset, cut: Windows, share: Any = None, *, validation: bool = False):
        self.dataset, self.cut, self.path, self.names = dataset, cut, dataset.path, dataset.names
        self.shards, self.description = dataset.shards, dataset.description
        shape = dataset.x.shape
        if len(shape) > 2 or dataset.x.dtype.kind not in "iuf":
            raise DataError(f"series are numbers of shape (steps, features), a file each, or (series, steps, features), found "
                            f"{dataset.x.dtype} rows of {shape}", file=self.path, dataset=dataset.x.name)
        self.in_rows, self.features = len(shape) == 2, int(shape[-1]) if shape else 1
        lengths = [int(shape[0])] * len(dataset) if self.in_rows else [shard["x"]["shape"][0] for shard in dataset.shards]
        self.targets = list(cut.targets) or list(range(self.features))
        for column in self.targets:
            if not 0 <= column < self.features:
                raise ConfigError(f"data.targets names the column {column}, and the series have {self.features}, 0 to "
                                  f"{self.features - 1}")
        ends = [n if share is None else int(n * (1 - share)) for n in lengths]
        self.firsts = np.array([max(end - cut.length, 0) if validation else 0 for end in ends], np.int64)
        self.stops = np.array(lengths if validation or share is None else ends, np.int64)
        counts = (self.stops - self.firsts - cut.length - cut.horizon) // cut.stride + 1
        if (counts < 1).any():
            self._refuse(int(np.flatnonzero(counts < 1)[0]), validation)
        self.starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self.n = int(counts.sum())
        self.x = WindowField(dataset.x, (cut.length, self.features))

    def _refuse(self, series: int, validation: bool) -> None:
        c, row = self.cut, series if self.in_rows else int(self.dataset.starts[series])
        file, inside = self.dataset.where(row)
        which = f"series {inside}" if self.in_rows else "the series"
        part = "for validation" if validation else "to train on"
        raise DataError(f"{which} has {self.stops[series] - self.firsts[series]} steps {part}, and a window takes "
                        f"{c.length + c.horizon}: data.length = {c.length} and data.horizon = {c.horizon}; lower them, change "
                        "data.validation or leave the series out", file=file, dataset=self.x_name)

    @property
    def x_name(self) -> str:
        return str(self.dataset.x.name)

    def __len__(self) -> int:
        return self.n

    def _places(self, rows: Rows) -> tuple[Rows, Rows]:
        """(number of the series, first step in it) of each window."""
        series = np.searchsorted(self.starts, rows, side="right") - 1
        return series, self.firsts[series] + (rows - self.starts[series]) * self.cut.stride

    def _steps(self, series: Rows, first: Rows, n: int) -> Values:
        """(rows, n, features): steps first .. first + n of each series."""
        if not self.in_rows:
            places = (self.dataset.starts[series] + first)[:, None] + np.arange(n)
            found: Values = self.dataset.read_field(self.dataset.x, places.reshape(-1))
            return found.reshape(len(series), n, self.features)
        several, which = np.unique(series, return_inverse=True)
        whole = self.dataset.read_field(self.dataset.x, several)
        taken: Values = whole[which[:, None], first[:, None] + np.arange(n)]
        return taken

    def read(self, rows: Rows) -> tuple[Values, Values]:
        series, first = self._places(rows)
        window = self._steps(series, first, self.cut.length + self.cut.horizon)
        return np.ascontiguousarray(window[:, :self.cut.length]), window[:, self.cut.length:][:, :, self.targets]

    def read_field(self, field: Any, rows: Rows) -> Values:
        """The inputs of windows, for a model in use."""
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n):
            raise DataError(f"row {int(rows.max())} of {self.n} windows", file=self.path)
        return self.read(rows)[0]

    def where(self, row: int) -> tuple[str, int]:
        """(file, row inside that file) where a window starts, for messages."""
        series, first = self._places(np.array([row], np.int64))
        return self.dataset.where(int(series[0]) if self.in_rows else int(self.dataset.starts[series[0]] + first[0]))

    def steps(self) -> Iterator[tuple[Values, Values]]:
        """Every step of these parts of the series once, (steps, features) and (steps, targets): what statistics are taken of."""
        for series, (begin, stop) in enumerate(zip(self.firsts, self.stops)):
            for first in range(int(begin), int(stop), BLOCK):
                n = min(BLOCK, int(stop) - first)
                x = self._steps(np.array([series]), np.array([first]), n)[0]
                rows = np.full(n, series) if self.in_rows else self.dataset.starts[series] + first + np.arange(n)
                check_finite(x, rows, self.dataset, self.x_name)
                yield x, x[:, self.targets]


def series_split(dataset: Dataset, cut: Windows, validation: float | str) -> tuple[SeriesWindows, SeriesWindows | None]:
    """(training, validation) windows: each series is cut at the same share of its steps; no step behind the cut is trained on.

    Only "tail:SHARE" (or 0) is possible: windows overlap, so a random share would train on what it validates.
    """
    found = share_of(validation)
    if found is None or found[0] and not found[1]:
        raise ConfigError(f'data.validation={validation}: windows of series overlap, so a random share would be seen in '
                          f'training; use "tail:0.2" or the path of other series')
    if not found[0]:
        return SeriesWindows(dataset, cut), None
    return SeriesWindows(dataset, cut, found[0]), SeriesWindows(dataset, cut, found[0], validation=True)


def refuse_without_length(kind: str, length: int, asked: Sequence[int], horizon: int) -> None:
    """ConfigError where keys of series and the kind of data do not fit."""
    if kind == KIND and not length:
        raise ConfigError("the data are series: set data.length, the steps of a window, and data.horizon, those to predict")
    if kind != KIND and length:
        raise ConfigError(f"data.length = {length} cuts series into windows, and these data are for {kind}; leave it out")
    if kind != KIND and (asked or horizon != 1):
        raise ConfigError(f"data.horizon and data.targets are for series, and these data are for {kind}; leave them out")
