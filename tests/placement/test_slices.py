"""Slices of buckets: they cover everything once, and are cut where block sums and whole parameters may be cut."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import nn
from mpitrain.kernels.optimizer import NORM_BLOCK
from mpitrain.nn.init import constant
from mpitrain.nn.storage import FlatStorage
from mpitrain.optim import squared_norm
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.placement.buckets import plan_buckets
from mpitrain.placement.slices import cut_slices, parts_of


def storage_of(sizes: list[int]) -> FlatStorage:
    parameters = [nn.Parameter((size,), constant(0.0)) for size in sizes]
    for i, parameter in enumerate(parameters):
        parameter.name = f"p{i}"
    return FlatStorage(parameters)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=6), st.integers(1, 9), st.booleans(), st.integers(1, 40_000))
def test_slices_cover_each_bucket_once_and_are_cut_at_blocks(sizes: list[int], n: int, whole: bool, bucket: int) -> None:
    storage = storage_of(sizes)
    starts = {s.start: s for s in storage.segments}
    for b in plan_buckets(storage.segments, storage.size, bucket):
        slices = cut_slices(storage.segments, b.start, b.stop, n, whole=whole)
        assert len(slices) == n and slices[0].start == b.start and slices[-1].stop == b.stop
        assert all(x.stop == y.start and x.start <= x.stop for x, y in zip(slices, slices[1:]))
        parts = [part for one in slices for part in parts_of(storage.segments, one)]
        assert sum(p.stop - p.start for p in parts) == sum(s.stop - s.start for s in b.segments)
        for part in parts:
            segment = next(s for s in storage.segments if s.name == part.name)
            assert (part.start - segment.start) % NORM_BLOCK == 0
            assert not whole or (part.start in starts and part.stop == segment.stop)


def test_slices_are_about_equal_where_blocks_allow() -> None:
    storage = storage_of([100_000])
    lengths = [s.stop - s.start for s in cut_slices(storage.segments, 0, storage.size, 4, whole=False)]
    assert max(lengths) - min(lengths) <= 2 * NORM_BLOCK


class InTurn:
    """A channel of n ranks that are played one after the other: twice, since what the first hears is not complete."""

    def __init__(self, n: int):
        self.size, self.rank, self.messages = n, 0, self
        self._said: list[Any] = [[] for _ in range(n)]
        self._added: list[Any] = [0.0] * n

    def gather_objects(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        return self._said

    def prepare(self, array: Any, name: str) -> Any:
        return SimpleNamespace(run=lambda: self._add(array))

    def _add(self, array: Any) -> None:
        same = np.shape(self._added[self.rank]) == array.shape
        self._added[self.rank] = array.copy()
        if same:                                              # else others have not counted with all parts yet
            array[...] = sum(self._added)


def norms_of(storage: FlatStorage, flat: Any, n: int) -> list[Any]:
    """What each of n ranks, which have a slice each, finds; and the name it would give."""
    channel: Any = InTurn(n)
    slices = cut_slices(storage.segments, 0, storage.size, n, whole=False)
    for turn in range(3):                                     # to say what there is, to add it, to hear the sum
        found = []
        for channel.rank, one in enumerate(slices):
            norm = GradientNorm(parts_of(storage.segments, one), channel=channel)
            found.append((norm(flat), norm.worst(flat)) if turn else None)
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=4), st.integers(2, 5))
def test_ranks_that_have_slices_find_the_bits_of_the_whole_norm(sizes: list[int], n: int) -> None:
    storage = storage_of(sizes)
    flat = np.random.default_rng(0).standard_normal(storage.size).astype(np.float32)
    assert {norm for norm, _ in norms_of(storage, flat, n)} == {math.sqrt(squared_norm(storage.segments, flat))}


def test_the_parameter_whose_gradient_is_not_finite_is_named() -> None:
    storage = storage_of([10, 10_000])
    flat = np.zeros(storage.size, np.float32)
    flat[storage.segments[1].start + 5000] = np.inf
    assert norms_of(storage, flat, 3) == [(np.inf, '"p1"')] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_an_empty_bucket_has_empty_slices(n: int) -> None:
    assert all(s.start == s.stop for s in cut_slices([], 0, 0, n, whole=False))
