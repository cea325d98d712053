"""Sparse linear maps along one dim: interpolation, padding from the array itself, and the adjoints of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, misfit, packed

MOST_UNIFORM = 4                                  # resample.c's


class Taps:
    """Output j is the sum of weight[t] x[index[t]] over t in [starts[j], starts[j + 1]). `size`: of the input."""

    def __init__(self, size: int, counts: Array, index: Array, weight: Array):
        self.size, self.outputs = size, len(counts)
        self.counts = np.asarray(counts, np.int64)
        self.index, self.weight = np.ascontiguousarray(index, np.int32), np.ascontiguousarray(weight, np.float64)
        self.starts = np.concatenate(([0], np.cumsum(self.counts))).astype(np.int32)
        assert self.counts.min(initial=0) >= 0
        assert self.index.size == self.weight.size == self.starts[-1]
        assert self.index.size == 0 or 0 <= self.index.min() <= self.index.max() < size
        self._tables: dict[tuple[Any, bool], tuple[Array, Array]] = {}

    @classmethod
    def of_rows(cls, size: int, index: Any, weight: Any = None) -> Taps:
        """As many taps for each output: index (outputs, taps), and weights of that shape, or 1."""
        index = np.asarray(index, np.int64)
        index = index.reshape(len(index), -1)
        weight = np.ones(index.shape) if weight is None else np.asarray(weight, np.float64)
        return cls(size, np.full(len(index), index.shape[1]), index.ravel(), weight.ravel())

    @classmethod
    def means(cls, size: int, starts: Sequence[int], stops: Sequence[int]) -> Taps:
        """Output j is the mean of [starts[j], stops[j])."""
        counts = np.asarray(stops, np.int64) - np.asarray(starts, np.int64)
        index = [np.arange(a, b) for a, b in zip(starts, stops)]
        return cls(size, counts, np.concatenate(index) if index else np.zeros(0), np.repeat(1 / counts, counts))

    @cached_property
    def transposed(self) -> Taps:
        """The adjoint; its taps stand in the order of the outputs they come from."""
        order = np.argsort(self.index, kind="stable")
        rows = np.repeat(np.arange(self.outputs), self.counts)
        back = Taps(self.outputs, np.bincount(self.index, minlength=self.size), rows[order], self.weight[order])
        back.__dict__["transposed"] = self
        return back

    @cached_property
    def uniform(self) -> int:
        """How many taps each output has, where that is a number that C knows; else 0."""
        return int(self.counts[0]) if self.outputs and 0 < self.counts[0] <= MOST_UNIFORM and np.ptp(self.counts) == 0 else 0

    @cached_property
    def copies(self) -> bool:
        return bool((self.weight == 1).all() and (self.counts == 1).all())

    def tables(self, dtype: Any, by_tap: bool) -> tuple[Array, Array]:
        """Index and weight as C reads them, output by output or tap by tap."""
        if (dtype, by_tap) not in self._tables:
            index, weight = self.index, self.weight.astype(dtype)
            if by_tap:
                index, weight = (np.ascontiguousarray(a.reshape(self.outputs, -1).T) for a in (index, weight))
            self._tables[dtype, by_tap] = index, weight
        return self._tables[dtype, by_tap]


def _resample(x: Array, taps: Taps, dim: int) -> Array:
    xp = array_module(x)
    if taps.copies:
        return xp.take(x, xp.asarray(taps.index), axis=dim)
    moved = xp.moveaxis(x, dim, 0)
    result = xp.zeros((taps.outputs, *moved.shape[1:]), x.dtype)
    for t in range(int(taps.counts.max(initial=0))):
        has = np.flatnonzero(taps.counts > t)
        chosen = taps.starts[has] + t
        weight = xp.asarray(taps.weight[chosen].astype(x.dtype)).reshape(-1, *[1] * (x.ndim - 1))
        result[xp.asarray(has)] += weight * moved[xp.asarray(taps.index[chosen])]
    return xp.moveaxis(result, 0, dim)


@host("resample", "resample", "X:osn X!:oun I:u+1 I X io is iu in i")
def _resample_host(function: CFunction, x: Array, taps: Taps, dim: int) -> Array:
    if x.dtype.char not in "fd":
        return _resample(x, taps, dim)
    if x.shape[dim] != taps.size:
        misfit(f"resample along dim {dim}, {taps.size} long", x)
    inner = prod(x.shape[dim + 1:])
    by_tap = taps.uniform if inner == 1 else 0
    y = np.empty((*x.shape[:dim], taps.outputs, *x.shape[dim + 1:]), x.dtype)
    function(packed(x), y, taps.starts, *taps.tables(x.dtype, by_tap > 0), prod(x.shape[:dim]), taps.size, taps.outputs, inner,
             by_tap)
    return y


resample = Kernel("resample", _resample, _resample_host, _resample_host.loop("resample"))
"""x with the map `taps` along `dim` (0 or more), from (x, taps, dim)."""
