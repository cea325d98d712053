"""The range of each layer's inputs over some rows, for formats whose scale of the inputs is fixed.

Sizes are counted by the upper bits of their floats: exponent and five bits behind it, so a bin is 3 % wide. Counts are whole
numbers, which the ranks add: so scales have the same bits on any number of ranks. Of the upper ends of bins, that one becomes the
largest size of int8 whose expected squared error (of rounding inside, of clipping outside) is least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, asnumpy
from mpitrain.comm.face import Objects
from mpitrain.errors import NumericsError, UsageError

SHIFT = 18                                        # bits of a float32 that do not count
BINS = 0x7F800000 >> SHIFT                        # of finite sizes


def ranges(model: nn.Module, layers: Sequence[str], read: Callable[[int], Any], n_chunks: int, channel: Objects
           ) -> dict[str, float]:
    """The scale of the inputs, their largest size / 127, of each layer of `model` (paths), over chunks of rows.

    `read(c)` gives chunk c of `n_chunks` as the model takes it. Every rank has the whole model, runs the chunks c with c mod
    channel.size = channel.rank, and gets the same scales. Raises, on all ranks alike, UsageError without chunks, and
    NumericsError, which names a layer whose inputs are not finite, or all zeros.
    """
    if not n_chunks:
        raise UsageError("there are no training rows to calibrate with")
    counts = {path: np.zeros(BINS + 1, np.int64) for path in layers}          # the last: what is not finite
    with no_grad(), _watched(model, counts):
        for chunk in range(channel.rank, n_chunks, channel.size):
            model(read(chunk))
    mine = {path: [[int(bin_), int(found[bin_])] for bin_ in np.flatnonzero(found)] for path, found in counts.items()}
    everyone = channel.gather_objects(mine)
    total = {path: np.zeros(BINS + 1, np.int64) for path in layers}
    for found in everyone:
        for path, pairs in found.items():
            for bin_, count in pairs:
                total[path][bin_] += count
    return {path: _scale(path, total[path]) for path in layers}


@contextmanager
def _watched(model: nn.Module, counts: dict[str, Array]) -> Iterator[None]:
    """Counts the inputs of the layers while it lasts."""
    modules = dict(model.named_modules())

    def counting(found: Array) -> Callable[[nn.Module, Any], None]:
        def count(module: nn.Module, inputs: Any) -> None:
            x = inputs[0].array if isinstance(inputs[0], Tensor) else inputs[0]
            bits = np.ascontiguousarray(asnumpy(x), np.float32).view(np.uint32).reshape(-1) & 0x7FFFFFFF
            found[:] += np.bincount(np.minimum(bits >> SHIFT, BINS), minlength=BINS + 1)
        return count
    leave = [modules[path].before_forward(counting(found)) for path, found in counts.items()]
    try:
        yield
    finally:
        for done in leave:
            done()


def _scale(path: str, counts: Array) -> float:
    """The scale with the least expected squared error, of a number for each bin and one for what is not finite."""
    if counts[BINS]:
        raise NumericsError(f'layer "{path}": {counts[BINS]:,} of its inputs are not finite on the calibration rows; look at the '
                            "data, or take a dynamic format")
    ends = ((np.arange(BINS, dtype=np.uint32) + 1) << SHIFT).view(np.float32).astype(np.float64)
    starts = (np.arange(BINS, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
    used = np.flatnonzero(counts[:BINS])
    used = used[used > 0]                         # zeros are exact with any scale
    if not len(used):
        raise NumericsError(f'layer "{path}": all its inputs are zeros on the calibration rows; take more rows (--calibrate), or '
                            "skip it")
    n, sizes, best = counts[used].astype(np.float64), (starts[used] + ends[used]) / 2, (np.inf, 0.0)
    for top in ends[max(used[-1] - 128, 0):used[-1] + 1]:     # at most 4 powers of two are clipped
        step, inside = top / 127, sizes <= top
        error = float((n * np.where(inside, np.minimum(step * step / 12, sizes * sizes), (sizes - top) ** 2)).sum())
        if error < best[0]:
            best = error, step
    return float(np.float32(best[1]))
