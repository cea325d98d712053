"""Shards: what each rank keeps of flat arrays, the boxes that its slices are of, and memory that is lent."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import nn, optim
from mpitrain.errors import GraphError
from mpitrain.kernels.optimizer import NORM_BLOCK
from mpitrain.models import gpt
from mpitrain.nn.init import constant, normal
from mpitrain.nn.rectangles import rectangles
from mpitrain.nn.storage import FlatLayout, FlatStorage
from mpitrain.parallel.policies.bucket_memory import BufferPool
from mpitrain.placement.bytes import predicted
from mpitrain.placement.shard_cuts import block_ends, needs_whole_parameters, where_to_cut
from mpitrain.placement.shards import Shards, Strips, finer, level
from mpitrain.placement.stages import cut

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def layout_of(*shapes: tuple[int, ...], memory: bool = False) -> FlatLayout:
    parameters = [nn.Parameter(shape, normal(1.0)) for shape in shapes]
    for i, parameter in enumerate(parameters):
        parameter.name = f"p{i}"
    return FlatStorage(parameters) if memory else FlatLayout(parameters)


@given(SHAPES, st.data())
def test_a_flat_range_is_a_few_boxes_in_order(shape: tuple[int, ...], draw: Any) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    start = draw.draw(st.integers(0, whole.size))
    stop = draw.draw(st.integers(start, whole.size))
    found = rectangles(shape, start, stop)
    parts = [whole[tuple(slice(a, b) for a, b in zip(low, high))].reshape(-1) for low, high in found]
    assert np.concatenate([*parts, np.empty(0, int)]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_pieces_of_a_leaf_that_is_cut_itself_lie_where_they_belong_in_the_whole(groups: int, rest: int, draw: Any) -> None:
    length = draw.draw(st.integers(1, 5))
    low = draw.draw(st.integers(0, length - 1))
    high = draw.draw(st.integers(low + 1, length))
    leaf = nn.Parameter((groups * length, rest), constant(0.0))
    leaf.narrow("tp", 0, low, high, groups=groups)
    whole = np.arange(groups * length * rest).reshape(groups * length, rest)
    own = np.concatenate([whole[g * length + low:g * length + high] for g in range(groups)]).reshape(-1)
    first = draw.draw(st.integers(0, own.size))
    stop = draw.draw(st.integers(first, own.size))
    seen = 0
    for view, start in leaf.pieces(own[first:stop], first):
        there = whole[tuple(slice(a, a + n) for a, n in zip(start, view.shape))]
        np.testing.assert_array_equal(view, there)
        seen += view.size
    assert seen == stop - first


def test_the_piece_of_a_scalar_is_a_view_that_can_be_written() -> None:
    flat = np.zeros(1)
    (view, start), = nn.Parameter((), constant(0.0)).pieces(flat, 0)
    view[...] = 3.0
    assert start == () and flat[0] == 3.0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=6), st.integers(1, 6), st.integers(4_000, 200_000), st.booleans())
def test_ranks_keep_every_element_once_and_about_equally_many(sizes: list[int], n: int, bucket: int, whole: bool) -> None:
    layout = layout_of(*((size,) for size in sizes))
    ranks = [Shards(layout, rank, n, bucket_bytes=bucket, cuts=[len(sizes)], whole=whole) for rank in range(n)]
    assert sum(shards.size for shards in ranks) == layout.size
    kept = np.zeros(layout.size, int)
    for shards in ranks:
        for unit in shards.units:
            kept[unit.own.start:unit.own.stop] += 1
            assert sum(p.stop - p.start for p in unit.parts) <= unit.shard.stop - unit.shard.start
        for part in shards.segments:
            assert part.first % NORM_BLOCK == 0 and not (whole and part.stop - part.start != part.parameter.size)
    assert (kept == 1).all()
    if not whole:
        assert max(shards.size for shards in ranks) - min(shards.size for shards in ranks) <= 2 * NORM_BLOCK + 64


def test_initial_values_of_the_slices_are_those_of_the_whole() -> None:
    whole = layout_of((100, 90), (5,), (70, 70), memory=True)
    assert isinstance(whole, FlatStorage)
    whole.initialise(3)
    for rank in range(3):
        shards = Shards(whole, rank, 3, bucket_bytes=20_000, cuts=[3], whole=False)
        strips, values = shards.strips(whole.values), shards.initialise(3)
        assert strips.shape == values.shape
        for part in shards.segments:
            np.testing.assert_array_equal(values[part.start:part.stop], strips[part.start:part.stop])


def test_a_strip_is_shown_and_not_copied() -> None:
    flat = np.arange(10.0)
    strips = Strips(flat, [slice(1, 3), slice(4, 4), slice(6, 9)], flat.dtype)
    assert strips.shape == (5,) and strips[2:5].tolist() == [6.0, 7.0, 8.0]
    strips[1:2][...] = 9.0
    assert flat[2] == 9.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_who_has_less_gets_more(held: list[int], more: int) -> None:
    found = level(held, more)
    assert sum(found) == pytest.approx(more, abs=1e-6) and min(found) >= 0
    after = [a + b for a, b in zip(held, found)]
    assert all(b < 1e-6 or a < min(after) + 1e-6 for a, b in zip(after, found))


def test_bounds_between_chunks_are_kept() -> None:
    assert finer([3, 4], [1, 3, 5]) == [1, 2, 2, 2]


def test_a_block_ends_where_its_own_parameters_do_and_twins_are_alone() -> None:
    model = gpt(layers=1, heads=1, width=8, block=4, vocabulary=5)
    ends = block_ends([model])
    assert ends[-1] == len(model.parameters()) and ends == sorted(ends) and ends[0] == 2
    model.untie()
    stages = [cut(model, i, 2) for i in range(2)]
    alone = []
    for stage in stages:
        layout = stage.model.describe()
        cuts = where_to_cut(stage, layout, blocks=False)
        shards = Shards(layout, 0, 2, bucket_bytes=1 << 20, cuts=cuts, whole=False, alike={"embed.token.weight"})
        alone += [unit for unit in shards.units if any(s.parameter.key == "embed.token.weight" for s in unit.segments)]
    assert len(alone) == 2 and all(len(unit.segments) == 1 for unit in alone)
    assert alone[0].sum_to_owners == alone[1].sum_to_owners


def test_memory_is_lent_again_once_nobody_shows_it() -> None:
    pool = BufferPool(layout_of((10,)))
    first = pool.take(100)
    kept, address = first[10:20].reshape(2, 5), first.ctypes.data
    del first
    gc.collect()
    assert pool.take(50).ctypes.data != address             # somebody still has a view
    del kept
    assert pool.take(100).ctypes.data == address
    before = pool.nbytes
    for _ in range(5):
        pool.take(100)
    assert pool.nbytes == before


def test_a_shard_is_the_storage_of_an_optimizer_and_of_its_state() -> None:
    layout = layout_of((100, 90), (70,))
    shards = Shards(layout, 1, 2, bucket_bytes=1 << 20, cuts=[2], whole=False)
    shards.values = shards.initialise(0)
    optimizer = optim.Adam(shards)
    assert sum(array.nbytes for array in optimizer.state.values()) == 8 * shards.size < 8 * layout.size
    before = shards.values.copy()
    optimizer.update(np.ones(shards.size, np.float32), lr=0.1, step=1, segments=shards.segments)
    assert all((shards.values[p.start:p.stop] != before[p.start:p.stop]).all() for p in shards.segments)
    with pytest.raises(GraphError, match="a trainer updates sharded ones"):
        optimizer.step()


@pytest.mark.parametrize(("name", "whole"), [("adamw", False), ("lamb", True), ("lars", True), ("sgd", False)])
def test_an_optimizer_is_asked_whether_it_needs_whole_parameters(name: str, whole: bool) -> None:
    assert needs_whole_parameters(lambda storage: optim.OPTIMIZERS[name](storage, lr=0.1)) == whole


def test_the_formula_is_that_of_the_paper() -> None:
    found = [sum(predicted(1000, kind, 4)) for kind in ("none", "optimizer", "gradients", "parameters")]
    assert found == [16_000, 8_000 + 2_000, 4_000 + 3_000, 4_000]
    found = [sum(predicted(1000, kind, 8, per_node=4)) for kind in ("none", "optimizer", "gradients", "parameters")]
    assert found == [1_000 + 4_000 + 2_000, 1_000 + 4_000 + 1_000, 1_000 + 500 + 1_000, 2_000]
