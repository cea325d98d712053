"""Softmax, cross-entropy, and rows of a table on a device; see kernels/rows.py."""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.runtime import Grid
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, aligned_rows, along_rows, computed, contiguous

SOURCE = Source("rows")
MOST, AT_A_TIME = 256, 4               # threads of a block (row.h's ROW_THREADS), and vectors of 16 bytes that each of them reads


def by_rows(rows: int, nbytes: int) -> tuple[Grid, int]:
    """A block for each row, of which all have `nbytes` together, and the threads of it: a warp at least."""
    threads = 32
    while threads < MOST and threads * AT_A_TIME * 16 * rows < nbytes:
        threads *= 2
    return (max(1, min(rows, 1 << 20)),), threads


def _of_rows(name: str, signature: str) -> None:
    run = SOURCE.function(name, signature)

    @device(name)
    def version(first: Array, *others: Array) -> Array:
        first = contiguous(first)
        result = array_module(first).empty(first.shape, first.dtype)
        if first.size:
            run(*by_rows(len(first), first.nbytes), first, *map(contiguous, others), result, *first.shape)
        return result


_of_rows("softmax", "X:rn X!:rn ir in")
_of_rows("log_softmax", "X:rn X!:rn ir in")
_of_rows("softmax_grad", "X:rn X:rn X!:rn ir in")
_of_rows("log_softmax_grad", "X:rn X:rn X!:rn ir in")

_cross_entropy = SOURCE.function("cross_entropy", "X~:rn L:r S!:r S?!:r S?!:r d i i ir in")
_cross_entropy_grad = SOURCE.function("cross_entropy_grad", "X~:rn X!~:rn L:r S:r S:r S:1 d i i ir in")


def _ignored(ignore: int | None) -> tuple[int, int]:
    return (0, 0) if ignore is None else (1, ignore)


@device("cross_entropy")
def cross_entropy(logits: Array, labels: Array, smoothing: float, ignore: int | None,
                  training: bool) -> tuple[Array, Array, Array]:
    """(losses, the logits, (2, R): the largest of each row, and the sum of exp(logit - largest)): no exponential is kept, since
    the gradient's kernel computes them faster than it would read them. Rows of logits may have gaps between them."""
    logits, xp = along_rows(logits), array_module(logits)
    rows = len(logits)
    losses = xp.empty(rows, computed(logits.dtype))
    kept = xp.empty((2, rows if training else 0), losses.dtype)
    if logits.size:
        run_kept = (kept[0], kept[1]) if training else (None, None)
        _cross_entropy(*by_rows(rows, logits.nbytes), logits, contiguous(labels), losses, *run_kept, smoothing,
                       *_ignored(ignore), *logits.shape)
    else:
        losses.fill(float("nan"))                                     # of no classes
    return losses, logits if training else logits[:0], kept


@device("cross_entropy_grad")
def cross_entropy_grad(logits: Array, labels: Array, kept: Array, smoothing: float, ignore: int | None, grad: Array,
                       own: bool = True) -> Array:
    result: Any = logits if own else aligned_rows(array_module(logits), len(logits), logits.shape[1], logits.dtype)
    if logits.size:
        _cross_entropy_grad(*by_rows(len(logits), logits.nbytes), logits, result, contiguous(labels), kept[0], kept[1],
                            contiguous(grad, kept.dtype), smoothing, *_ignored(ignore), *logits.shape)
    return result
