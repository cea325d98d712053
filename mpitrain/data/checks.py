"""Values that cannot be trained on, found where they are read and named by file and row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from mpitrain.data.shards import Dataset, Field, Rows, Values
from mpitrain.errors import DataError


class Source(Protocol):
    """What gives samples: a `Dataset` or `TokenWindows`."""

    kind: str
    names: tuple[Any, str]          # The datasets that inputs (a table, where they have names) and targets come from.

    def __len__(self) -> int: ...
    def read(self, rows: Rows) -> tuple[Any, Values]: ...
    def where(self, row: int) -> tuple[str, int]: ...


def check_finite(values: Values, rows: Rows, source: Source, name: str) -> None:
    """Raise DataError at the first row that holds NaN or Inf. A finite sum proves all finite, which costs one pass."""
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return
    bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    if bad.size:
        flat = values[bad[0]].reshape(-1)
        place = int(np.flatnonzero(~np.isfinite(flat))[0])
        file, row = source.where(int(rows[bad[0]]))
        raise DataError(f"value {place} of this row is {flat[place]}; remove the row or repair it",
                        file=file, dataset=name, row=row)


def check_exact(values: Values, rows: Rows, source: Source, name: str, dtype: Any) -> None:
    """Raise DataError at the first row with an integer that a model's `dtype` lacks: it would become its neighbour."""
    def place(row: int) -> dict[str, Any]:
        file, row = source.where(int(rows[row]))
        return {"file": file, "dataset": name, "row": row}

    refuse_inexact(values, dtype, place)


def refuse_inexact(values: Values, dtype: Any, place: Callable[[int], Mapping[str, Any]]) -> None:
    """`check_exact` for values from anywhere; `place` says where a row of them is."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 4 or not values.size:
        return
    exact = 1 << (np.finfo(dtype).nmant + 1)                 # each integer up to here is a number of that format
    if int(values.max()) <= exact and int(values.min()) >= -exact:
        return
    with np.errstate(invalid="ignore"):                      # what overflows is another number, too
        wrong = (values.astype(dtype).astype(values.dtype) != values).reshape(len(values), -1)
    bad = np.flatnonzero(wrong.any(axis=1))
    if bad.size:
        value = values[bad[0]].reshape(-1)[wrong[bad[0]]][0]
        raise DataError(f"inputs are cast to the model's {np.dtype(dtype)}, which holds each whole number up to {exact}, but not "
                        f"{value}; store numbers that may be rounded as floats, count identities from 0, or set "
                        'train.precision = "float64"', **place(int(bad[0])))


def check_labels(labels: Values, rows: Rows, n_classes: int, source: Source, name: str, ignore: int | None = None) -> None:
    """Raise DataError at the first label outside 0..n_classes-1 (and not `ignore`)."""
    if not len(labels) or ignore is None and labels.min() >= 0 and labels.max() < n_classes:
        return
    wrong = (labels < 0) | (labels >= n_classes)
    if ignore is not None:
        wrong &= labels != ignore
    bad = np.flatnonzero(wrong.reshape(len(labels), -1).any(axis=1))
    if bad.size:
        value = labels[bad[0]].reshape(-1)[wrong[bad[0]].reshape(-1)][0]
        file, row = source.where(int(rows[bad[0]]))
        what = "token" if source.kind == "tokens" else "label"
        raise DataError(f"{what} {value} is outside 0..{n_classes - 1} ({n_classes} classes); correct the data or the model's "
                        f"number of outputs", file=file, dataset=name, row=row)


def scan_labels(dataset: Dataset, n_classes: int | None = None, ignore: int | None = None) -> int:
    """Look at every label (or token) once, before the first step; the largest one + 1. With `n_classes` they are checked, but
    for those equal to `ignore`."""
    field = dataset.x if dataset.kind == "tokens" else dataset.y
    assert field is not None
    largest = 0
    for rows, labels in blocks(dataset, field):
        known = n_classes if n_classes is not None else max(1, int(labels.max()) + 1)
        check_labels(labels, rows, known, dataset, field.name, ignore)
        largest = max(largest, int(labels.max()) + 1)
    return largest


def scan_targets(dataset: Dataset, loss: Any) -> None:
    """Look at every target once, before the first step. Raise DataError at the first that is not what the loss says of them
    (`nn.Loss.bounds` and `among`); NaN is found where rows are read."""
    (low, high), among = getattr(loss, "bounds", (-math.inf, math.inf)), getattr(loss, "among", ())
    if dataset.y is None or not among and (low, high) == (-math.inf, math.inf):
        return
    wanted = " or ".join(f"{n:g}" for n in among) if among else f"{low:g} {'or more' if high == math.inf else f'to {high:g}'}"
    for rows, targets in blocks(dataset, dataset.y):
        wrong = ~np.isin(targets, among) & (targets == targets) if among else (targets < low) | (targets > high)
        if wrong.any():
            first = int(np.flatnonzero(wrong.reshape(len(rows), -1).any(axis=1))[0])
            value = targets[first].reshape(-1)[wrong[first].reshape(-1)][0]
            file, row = dataset.where(int(rows[first]))
            raise DataError(f"a target is {value:g}, and train.loss ({type(loss).__name__}) wants {wanted}; correct the data or "
                            "change train.loss", file=file, dataset=dataset.y.name, row=row)


def blocks(dataset: Dataset, field: Field) -> Iterator[tuple[Rows, Values]]:
    """All rows of one column, some at a time: their numbers and their values."""
    step = max(1, (4 << 20) // max(field.row_bytes, 1))
    for start in range(0, len(dataset), step):
        rows = np.arange(start, min(start + step, len(dataset)), dtype=np.int64)
        yield rows, dataset.read_field(field, rows)
