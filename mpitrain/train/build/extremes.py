"""The largest and smallest integers of inputs by name, through the model's first block before training: an identity that a table
of the model lacks is found there, and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import no_grad
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import everywhere, on_first
from mpitrain.data import Dataset
from mpitrain.data.checks import blocks
from mpitrain.data.shards import Fields
from mpitrain.errors import DataError
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.names import first_of

COLUMNS = 64                     # of a row: each has extremes of its own; of longer rows, such as tokens, all are alike


class Extreme(NamedTuple):
    """The smallest or largest integer of a column, and its row; column -1: of all columns together."""

    row: int
    name: str
    column: int
    value: int


def try_extremes(inference: Inference, inputs: Inputs, control: Objects) -> None:
    """DataError, on all ranks, where the first block of the model cannot take a row with an extreme integer. It communicates, and
    reads all integers once. Models without inputs by name look up nothing but tokens, whose range is checked as such."""
    for source in (inputs.training, inputs.validation if inputs.validation is not inputs.training else None):
        if not isinstance(source, Dataset) or not isinstance(source.x, Fields):
            continue
        found = on_first(control, lambda source=source: list(extremes(source)))       # type: ignore[misc]
        everywhere(control, lambda source=source, found=found: _take(inference, inputs, source,        # type: ignore[misc]
                                                                     [Extreme(*one) for one in found]))


def extremes(dataset: Dataset) -> Iterator[Extreme]:
    """Those of each integer column of the inputs; of several in one row the one that stands out: below 0, or the largest."""
    best: dict[tuple[str, int, int], Extreme] = {}
    for name, field in dataset.x.fields.items():
        for rows, values in blocks(dataset, field) if field.dtype.kind in "iu" else ():
            flat = values.reshape(len(values), -1)
            if flat.shape[1] > COLUMNS:
                flat = np.stack([flat.min(1), flat.max(1)], 1)
            for column in range(flat.shape[1]):
                for sign in (-1, 1):
                    place = int((flat[:, column] if sign > 0 else -flat[:, column].astype(np.int64)).argmax())
                    value, key = int(flat[place, column]), (name, column, sign)
                    if key not in best or sign * value > sign * best[key].value:
                        whole = values[0].size > COLUMNS
                        best[key] = Extreme(int(rows[place]), name, -1 if whole else column, value)
    yield from {one.row: one for one in sorted(best.values(), key=lambda one: (one.value < 0, one.value))}.values()


def _take(inference: Inference, inputs: Inputs, source: Dataset, found: list[Extreme]) -> None:
    """The rows through the first block, if it is here."""
    stage = inference.stage
    if stage.index or not found:
        return
    first: Any = first_of(stage.chunks[0])
    training = stage.model.training
    stage.model.eval()
    try:
        with no_grad():
            for one in found:
                x, _ = source.read(np.array([one.row], np.int64))
                try:
                    first(inference.feed.tensors(inputs.transforms(x)))
                except DataError as error:
                    raise _named(error, source, x, one) from error
    finally:
        stage.model.train(training)


def _named(error: DataError, source: Dataset, x: Any, one: Extreme) -> DataError:
    file, row = source.where(one.row)
    where = "" if one.column < 0 or x.values[one.name].ndim == 1 else f" in column {one.column}"
    return DataError(f'the input "{one.name}" is {one.value}{where}, and the model has no place for it: {error.message}; correct '
                     "the data or the model's sizes", file=file, dataset=source.x.name[one.name], row=row)
