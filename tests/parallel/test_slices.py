"""Slices of buckets: they cover everything once, and are cut where block sums and whole parameters may be cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import nn
from mpitrain.kernels.optimizer import BLOCK
from mpitrain.nn.init import constant
from mpitrain.nn.storage import FlatStorage
from mpitrain.optim import BlockSums, squared_norm
from mpitrain.parallel.buckets import plan_buckets
from mpitrain.parallel.slices import cut_slices, parts_of


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
            assert (part.start - segment.start) % BLOCK == 0
            assert not whole or (part.start in starts and part.stop == segment.stop)


def test_slices_are_about_equal_where_blocks_allow() -> None:
    storage = storage_of([100_000])
    lengths = [s.stop - s.start for s in cut_slices(storage.segments, 0, storage.size, 4, whole=False)]
    assert max(lengths) - min(lengths) <= 2 * BLOCK


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=4), st.integers(1, 5))
def test_block_sums_written_in_parts_give_the_bits_of_the_whole_norm(sizes: list[int], n: int) -> None:
    storage = storage_of(sizes)
    flat = np.random.default_rng(0).standard_normal(storage.size).astype(np.float32)
    blocks = BlockSums(storage)
    sums = np.full(blocks.size, np.nan)
    for one in cut_slices(storage.segments, 0, storage.size, n, whole=False)[::-1]:
        blocks.write(sums, flat, parts_of(storage.segments, one))
    assert blocks.total(sums) == squared_norm(storage, flat)


def test_the_parameter_whose_gradient_is_not_finite_is_named() -> None:
    storage = storage_of([10, 10_000])
    flat = np.zeros(storage.size, np.float32)
    flat[storage.segments[1].start + 5000] = np.inf
    blocks = BlockSums(storage)
    sums = np.zeros(blocks.size)
    blocks.write(sums, flat, storage.segments)
    assert blocks.not_finite(sums) == "p1"


@pytest.mark.parametrize("n", [1, 3])
def test_an_empty_bucket_has_empty_slices(n: int) -> None:
    assert all(s.start == s.stop for s in cut_slices([], 0, 0, n, whole=False))
