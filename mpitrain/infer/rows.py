"""Rows on their way to a trained model: how many it takes at a time, and which it cannot take."""

from __future__ import annotations

from typing import Any

from mpitrain.errors import ShapeError

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
