"""Batches of sequences of several lengths: padded, (B, L, ...), or packed, which is what recurrent layers compute on.

Letters: `B` batch, `L` the longest length, `R` rows: the sum of all lengths. Dims stand as our layers have them: `batch_first`
is True unless said otherwise, here as in `LSTM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.errors import ShapeError

__all__ = ["PackedSequence", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence"]


class PackedSequence(NamedTuple):
    """Steps one after the other: of step t the rows of the first ``batch_sizes[t]`` sequences, the longest first.

    ``sorted_indices`` (B,) says which sequence of the batch each of those is, and ``unsorted_indices`` is its inverse; both are
    None where the batch came sorted. To be made by `pack_padded_sequence`, not by hand.
    """

    data: Any                                     # (R, ...)
    batch_sizes: Array                            # (L,) whole numbers
    sorted_indices: Array | None = None
    unsorted_indices: Array | None = None

    def lengths(self) -> Array:
        """(B,) the lengths, as the sequences are sorted."""
        return (np.arange(self.batch_sizes[0])[:, None] < self.batch_sizes).sum(axis=1)


def _lengths(lengths: Any, batch: int, longest: int) -> Array:
    found = asnumpy(lengths.array if isinstance(lengths, Tensor) else np.asarray(lengths))
    if found.shape == (batch,) and (found.dtype.kind not in "iuf" or (found != np.floor(found)).any()):
        raise ShapeError(f"pack_padded_sequence: lengths {found.tolist()} are {found.dtype}, expected whole numbers")
    if found.shape != (batch,) or not batch:
        raise ShapeError(f"pack_padded_sequence: lengths of shape {found.shape}, expected a whole number for each of {batch} "
                         "sequences")
    found = found.astype(np.int64)
    if found.min() < 1 or found.max() > longest:
        raise ShapeError(f"pack_padded_sequence: lengths from {found.min()} to {found.max()}, expected 1 to {longest}; leave out "
                         "sequences without steps")
    return found


def _rows(lengths: Array) -> tuple[Array, Array, Array]:
    """(sizes (L,), sequence (R,), step (R,)) of sequences of these lengths, the longest first."""
    there = np.arange(lengths[0])[:, None] < lengths                  # (L, B)
    step, sequence = np.nonzero(there)
    return there.sum(axis=1), sequence, step


def pack_padded_sequence(input: Any, lengths: Any, batch_first: bool = True, enforce_sorted: bool = True) -> PackedSequence:
    """The rows of ``input`` (B, L, ...) that `lengths` (B,) says are there; (L, B, ...) where not `batch_first`.

    ShapeError where `enforce_sorted` and a sequence is longer than the one before it; without, they are sorted here, and layers
    and `pad_packed_sequence` give the order back.
    """
    if len(input.shape) < 2:
        raise ShapeError(f"pack_padded_sequence: an input of shape {tuple(input.shape)}, expected (batch, length, ...)")
    batch, longest = input.shape[:2] if batch_first else input.shape[1::-1]
    counts, order = _lengths(lengths, batch, longest), None
    if enforce_sorted and (counts[1:] > counts[:-1]).any():
        raise ShapeError(f"pack_padded_sequence: lengths {counts.tolist()} are not sorted, the longest first; sort them, or set "
                         "enforce_sorted=False")
    if not enforce_sorted:
        order = np.argsort(-counts, kind="stable")
        counts = counts[order]
    sizes, sequence, step = _rows(counts)
    which = sequence if order is None else order[sequence]
    data = ops.getitem(input, (which, step) if batch_first else (step, which))
    return PackedSequence(data, sizes, order, None if order is None else np.argsort(order))


def pad_packed_sequence(sequence: PackedSequence, batch_first: bool = True, padding_value: float = 0.0,
                        total_length: int | None = None) -> tuple[Tensor, Array]:
    """(padded (B, L, ...), lengths (B,)), in the order that the batch had before it was packed; L is `total_length` if given."""
    lengths = sequence.lengths()
    length = len(sequence.batch_sizes) if total_length is None else total_length
    if length < len(sequence.batch_sizes):
        raise ShapeError(f"pad_packed_sequence: total_length is {length}, the longest sequence has {len(sequence.batch_sizes)} "
                         "steps")
    _, which, step = _rows(lengths)
    data, rows = sequence.data, len(which)
    if len(data.shape) < 1 or data.shape[0] != rows:
        raise ShapeError(f"pad_packed_sequence: data of shape {tuple(data.shape)}, batch_sizes count {rows} rows")
    if sequence.sorted_indices is not None:
        which, lengths = np.asarray(sequence.sorted_indices)[which], lengths[sequence.unsorted_indices]
    places = np.full((len(lengths), length), rows)                    # the row behind the last one is the padding
    places[which, step] = np.arange(rows)
    xp = array_module(data.array if isinstance(data, Tensor) else data)
    padding = xp.full((1, *data.shape[1:]), padding_value, data.dtype)
    return ops.getitem(ops.concatenate([data, padding]), places if batch_first else places.T), lengths


def _together(sequences: Sequence[Any], name: str) -> tuple[Any, Array]:
    """(the sequences one after the other, their lengths)."""
    shapes = [tuple(each.shape) for each in sequences]
    if not shapes or any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        raise ShapeError(f"{name}: sequences of shapes {shapes}, expected at least one, and the same dims after the first")
    return ops.concatenate(list(sequences)), np.array([shape[0] for shape in shapes])


def pad_sequence(sequences: Sequence[Any], batch_first: bool = True, padding_value: float = 0.0, padding_side: str = "right"
                 ) -> Tensor:
    """(B, L, ...) of sequences (length, ...), those that are shorter filled up with `padding_value`."""
    if padding_side not in ("right", "left"):
        raise ShapeError(f'pad_sequence: padding_side is "right" or "left", not "{padding_side}"')
    data, lengths = _together(sequences, "pad_sequence")
    longest = int(lengths.max())
    first = np.cumsum(lengths) - lengths
    step = np.arange(longest) - (0 if padding_side == "right" else longest - lengths[:, None])
    places = np.where((step >= 0) & (step < lengths[:, None]), first[:, None] + step, lengths.sum())
    xp = array_module(data.array)
    padding = xp.full((1, *data.shape[1:]), padding_value, data.dtype)
    return ops.getitem(ops.concatenate([data, padding]), places if batch_first else places.T)


def pack_sequence(sequences: Sequence[Any], enforce_sorted: bool = True) -> PackedSequence:
    """Sequences (length, ...), packed; see `pack_padded_sequence`."""
    padded = pad_sequence(sequences)
    return pack_padded_sequence(padded, [each.shape[0] for each in sequences], enforce_sorted=enforce_sorted)
