"""Rows on their way to a trained model: how many it takes at a time, and which it cannot take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.config import Config
from mpitrain.data.columns import PREFIX, Columns
from mpitrain.errors import ConfigError, DataError, ShapeError

CHUNK = 64                               # rows: their activations stay in the cache, and few rows are shared out evenly;
CHUNK_TOKENS = 64 * 64                   # tokens, so fewer rows of long texts


def chunk_rows(shape: tuple[int, ...], tokens: bool) -> int:
    """The rows of this shape that are computed together. It depends on nothing else, so neither do bits."""
    return max(1, min(CHUNK, CHUNK_TOKENS // shape[0])) if tokens else CHUNK


def refuse_rows(shape: tuple[int, ...], dtype: Any, tokens: bool, **where: Any) -> None:
    """ShapeError where a model that takes `tokens` gets anything else, or values are no numbers; `where` says of what file."""
    if dtype.kind not in "biuf":
        raise ShapeError(f"rows are numbers, found {dtype}", **where)
    if tokens and (dtype.kind not in "iu" or len(shape) != 1):
        raise ShapeError(f"rows are {dtype} of shape {shape}: a language model takes rows of tokens, integers of shape "
                         "(rows, length)", **where)


@dataclass(frozen=True)
class TrainingRow:
    """What is known of the rows that a model was trained on: their shape and dtype, before transforms, or, of tokens, how many
    a row has at most and how many there are. None where nothing is."""

    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    block: int | None = None
    vocabulary: int | None = None
    by_name: Mapping[str, TrainingRow] = field(default_factory=dict)      # of inputs by name

    @property
    def advice(self) -> str:
        if self.block is not None:
            return f"change the rows: one has at most {self.block:,} tokens"
        if self.by_name:
            listed = ", ".join(f"{name} {one.dtype} of shape {one.shape}" for name, one in self.by_name.items())
            return f"change the rows to such as the model was trained on ({listed})"
        known = "" if self.shape is None else f" ({self.dtype} of shape {self.shape})"
        return f"change the rows to such as the model was trained on{known}"

    def refuse_tokens(self, x: Any, place: Callable[[int], Mapping[str, Any]] = lambda row: {"row": row}) -> None:
        """DataError at the first row with a token that the model's table lacks; `place` says where a row of `x` is."""
        if self.vocabulary is None or not x.size or x.min() >= 0 and x.max() < self.vocabulary:
            return
        wrong = (x < 0) | (x >= self.vocabulary)
        row = int(np.flatnonzero(wrong.any(axis=1))[0])
        raise DataError(f"token {x[row][wrong[row]][0]} is not in 0 ... {self.vocabulary - 1}: the model knows "
                        f"{self.vocabulary:,} tokens; change the rows to numbers of its table", **place(row))

    def alike(self, x: Columns, place: Callable[[str, int], Mapping[str, Any]] = lambda name, row: {"row": row}) -> Columns:
        """The inputs by name with integers where the training rows had some: a table of floats may hold them too. DataError at
        the first value that is none."""
        return Columns({name: self._whole(name, values, place) for name, values in x.items()})

    def _whole(self, name: str, values: Any, place: Callable[[str, int], Mapping[str, Any]]) -> Any:
        known = self.by_name.get(name)
        if known is None or known.dtype is None or known.dtype.kind == "f" or values.dtype.kind != "f":
            return values
        with np.errstate(invalid="ignore"):
            found = values.astype(np.int64)
        wrong = (found != values).reshape(len(values), -1)
        if wrong.any():
            row = int(np.flatnonzero(wrong.any(axis=1))[0])
            raise DataError(f'the input "{name}" is of whole numbers, found {values[row].reshape(-1)[wrong[row]][0]:g}; change '
                            "the rows to numbers of the model's tables", **place(name, row))
        return found

    def other_kind(self, dtype: Any) -> str:
        """A line about rows of floats where the model was trained on integers, or the other way; "" where they are alike."""
        if self.dtype is None or self.block is not None or (self.dtype.kind == "f") == (dtype.kind == "f"):
            return ""
        return (f"the rows are {dtype}, and the model was trained on {self.dtype}: their values are taken as they are, so give "
                "them the scale of the training rows")

    def taken(self, action: Callable[[], Any], shape: tuple[int, ...], **where: Any) -> Any:
        """What `action()` gives for rows of `shape`. ShapeError that advises to change the rows where it cannot take them."""
        try:
            return action()
        except ShapeError as error:
            raise ShapeError(f"{error.message.partition(';')[0]}; {self.advice}", **where) from error
        except ConfigError as error:
            if self.shape is None or self.block is not None or shape == self.shape:
                raise
            raise ShapeError(f"rows have shape {shape}, which data.transform does not take; {self.advice}", **where) from error


def trained_on(meta: Mapping[str, Any], config: Config) -> TrainingRow:
    """What a checkpoint's record says of the training rows; of an older one its first file says it, if that has no manifest."""
    block, vocabulary = (config.model.arguments.get(key) for key in ("block", "vocabulary"))
    if type(block) is int:
        return TrainingRow(block=block, vocabulary=vocabulary if type(vocabulary) is int else None)
    data = ((meta.get("experiment") or {}).get("data") or {}).get("training") or {}
    row = data.get("row")
    if row is None:
        first: Mapping[str, Any] = next(iter(data.get("files", ())), {})
        x = first.get("x") or {}
        row = {"shape": x["shape"][1:], "dtype": x["dtype"]} if "shape" in x and "dtype" in x else None
    if row is not None and "shape" not in row:
        return TrainingRow(by_name={label[len(PREFIX):]: TrainingRow(tuple(one["shape"]), np.dtype(one["dtype"]))
                                    for label, one in row.items()})
    return TrainingRow() if row is None else TrainingRow(tuple(row["shape"]), np.dtype(row["dtype"]))
