"""A trained model in a program of its own, in one process and without MPI:

    import mpitrain
    model = mpitrain.load("runs/own")                    # the newest checkpoint; or step=1200, or step="best"
    outputs = model.predict(rows)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from mpitrain.backend import CPU, float_dtype
from mpitrain.data.checks import refuse_inexact
from mpitrain.data.columns import Columns
from mpitrain.errors import ShapeError, print_warning
from mpitrain.infer.forms import ARGUMENTS, OUTPUTS, Form, form, undone
from mpitrain.infer.recorded import Recorded
from mpitrain.infer.rows import TrainingRow, chunk_rows, refuse_rows, trained_on
from mpitrain.kernels.product import one_thread_inside
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.train.build import saved
from mpitrain.train.build.from_config import make_loss
from mpitrain.train.build.model import leaves_out_zeros
from mpitrain.train.build.names import refuse_names


@dataclass(frozen=True)
class TrainedModel(saved.SavedModel):
    """A saved model that computes outputs of rows."""

    @cached_property
    def forward(self) -> Recorded:
        """The model as a function of a batch, as fast as it is here."""
        if leaves_out_zeros(self.config):
            from mpitrain.shrink.sparse import sparsify  # most runs are not pruned
            sparsify(self.model)
        return Recorded(self.model)

    @cached_property
    def _feed(self) -> Feed:
        return Feed(CPU, float_dtype(self.config.train.precision), tokens=self.tokens)

    @cached_property
    def _form(self) -> Callable[[str, bool], Form]:
        return cache(lambda keep, inverse: form(keep, make_loss(self.config, self.tokens),
                                                undone(self.transforms, ARGUMENTS) if inverse else None, ARGUMENTS))

    @cached_property
    def _trained(self) -> TrainingRow:
        return trained_on(self.meta, self.config)

    @cached_property
    def _tell_kind(self) -> Callable[[Any], None]:
        """Warns, once for each dtype, of rows that are floats where the training rows were integers, or the other way."""
        return cache(lambda dtype: print_warning(text) if (text := self._trained.other_kind(dtype)) else None)

    @cached_property
    def tokens(self) -> bool:
        """Whether rows are tokens of a language model."""
        return "block" in self.config.model.arguments

    def _outputs(self, rows: Any, first: int) -> Any:
        """The outputs of rows as the data files have them; `first` is the number of the first one."""
        if isinstance(rows, Columns):
            rows = self._trained.alike(rows, lambda name, row: {"row": first + row, "dataset": name})
            return self.forward(self._feed.tensors(self.transforms(rows))).array
        given = self.transforms(rows)
        if not self.tokens:
            refuse_inexact(given, self._feed.dtype, lambda row: {"row": first + row})
        return self.forward.of(self._feed.inputs(given))

    def predict(self, rows: Any, keep: str = OUTPUTS, *, inverse: bool = False) -> Any:
        """The model's outputs for rows (rows, ...) as the data files have them, before their transforms; an array. Of a model
        with inputs by name `rows` is a dict of arrays.

        `keep` is "outputs", or "classes" or "probabilities" where the run's loss is one of classes; `inverse` gives outputs in
        the units that targets had before data.target_transform. The bits are those of the verb, which computes in the same
        chunks. ShapeError where the model cannot take the rows, DataError for whole numbers that its dtype lacks, UsageError for
        another `keep`.
        """
        x: Any = columns(rows) if isinstance(rows, Mapping) else _checked(np.asarray(rows), self.tokens)
        refuse_names(self.model, x)
        kept, size, trained = self._form(keep, inverse), chunk_rows(x.shape[1:], self.tokens), self._trained
        if self.tokens:
            trained.refuse_tokens(x)
        if not isinstance(x, Columns):
            self._tell_kind(x.dtype)
        with one_thread_inside(), np.errstate(all="ignore"):
            found = trained.taken(lambda: [kept.made(self._outputs(x[i:i + size], i)) for i in range(0, len(x), size)],
                                  x.shape[1:])
        return found[0] if len(found) == 1 else np.concatenate(found)


def _checked(x: Any, tokens: bool) -> Any:
    """ShapeError for what are no rows."""
    if x.ndim == 0 or 0 in x.shape:
        raise ShapeError(f"predict takes rows along the first dim, at least one, found an array of shape {x.shape}")
    refuse_rows(x.shape[1:], x.dtype, tokens)
    return x


def columns(rows: Mapping[str, Any]) -> Columns:
    """Inputs by name. ShapeError unless they have as many rows each."""
    x = Columns({name: _checked(np.asarray(values), False) for name, values in rows.items()})
    counts = {name: len(values) for name, values in x.items()}
    if len(set(counts.values())) != 1:
        raise ShapeError(f"each input has as many rows as the others, found {counts}")
    return x


def load(folder: str | os.PathLike[str], step: int | str | None = None, overrides: Sequence[str] = ()) -> TrainedModel:
    """The model of a run folder: of its newest checkpoint, of a step, or of the "best" validation loss. Raises what
    `saved.load` does."""
    found = saved.load(folder, step, overrides)
    return TrainedModel(**{one.name: getattr(found, one.name) for one in fields(found)})
