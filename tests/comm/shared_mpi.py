"""All-reduce in shared memory: every number type, order and way, by the C kernel and by NumPy, on one node and on several."""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared import channel as shared_module
from mpitrain.comm.shared import engine, window
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.engine import SCRATCH_BYTES, SLOTS
from mpitrain.comm.shared.fold import ADD, binary_tree, fold_numpy, left_fold, narrow, storage, widen
from mpitrain.comm.shared.node import Node
from mpitrain.errors import DesyncError, ShapeError

Array = np.ndarray[Any, Any]
Make = Callable[..., SharedChannel]
LARGE = SCRATCH_BYTES // 4 * 3                                # float32 elements that are summed in place
SIZES = [0, 1, 3, 1000, 8191, LARGE + 1, 50_003]


@pytest.fixture(params=["native", "polling"])
def make(comm: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes shared channels, by the C kernel or without a compiler, and closes them."""
    if request.param == "polling":
        monkeypatch.setattr(shared_module, "kernels", lambda: None)
    made: list[SharedChannel] = []

    def make(color: int | None = None, free: Callable[[], int] | None = None, **options: Any) -> SharedChannel:
        progress = Progress()
        node = Node(comm, progress, color=color, **({"free": free} if free else {}))
        channel = SharedChannel(Channel(comm.Dup(), "test", progress=progress), node, **options)
        made.append(channel)
        return channel

    yield make
    for channel in made:
        channel.close()
        channel.node.close()


@functools.cache
def values(rank: int, size: int, name: str = "float32", salt: int = 0) -> Array:
    """What a rank contributes, as stored; every rank can compute everyone's."""
    return narrow(np.random.default_rng([rank, size, salt]).standard_normal(size).astype(
        np.float64 if name == "float64" else np.float32), name)


@functools.cache
def folded(n: int, size: int, order: Callable[[int], list[int]], name: str = "float32", salt: int = 0) -> Array:
    result = np.zeros(size, storage(name))
    fold_numpy([values(rank, size, name, salt) for rank in range(n)], order(n), [result], 0, size, name)
    return result


def same_on_all_ranks(comm: Any, array: Array) -> bool:
    return len(set(comm.allgather(hashlib.sha256(array.tobytes()).hexdigest()))) == 1


def arena(channel: SharedChannel, size: int, name: str = "float32") -> Array:
    dtype = storage(name)
    return channel.allocate(size * dtype.itemsize).view(dtype)


@pytest.mark.parametrize("order", [left_fold, binary_tree])
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_the_sum_has_the_bits_of_the_stated_order_on_every_rank(make: Make, comm: Any, name: str, order: Any) -> None:
    channel = make(order=order)
    memory = arena(channel, 2 * max(SIZES), name)
    if comm.size == 1 and name == "bfloat16":
        pytest.skip("one rank sums nothing, so it does not take what cannot be sent")
    for size in SIZES:
        for start in (0, 5):                                  # 5: begins inside a cache line
            array = memory[start:start + size]
            array[...] = values(comm.rank, size, name)
            memory[start + size:start + size + 3] = 1
            channel.allreduce(array, name="x", dtype=name)
            assert array.tobytes() == folded(comm.size, size, order, name).tobytes(), (size, start)
            assert (memory[start + size:start + size + 3] == 1).all()
        if size:
            exact = sum(widen(values(rank, size, name), name).astype(np.float64) for rank in range(comm.size))
            bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[name]
            assert np.abs(widen(array, name) - exact).max(initial=0) <= comm.size * 10 * 2.0 ** -bits


def test_memory_of_all_ranks_is_one_and_messages_are_not_used(make: Make, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = make()
    memory = arena(channel, LARGE)
    if comm.size == 1:
        pytest.skip("one rank shares with nobody")
    assert channel.shared and channel.fuses == (shared_module.kernels() is not None)
    assert not channel.notes and memory.ctypes.data % 64 == 0
    monkeypatch.setattr(channel.messages, "prepare", None)
    memory[...] = comm.rank
    channel.allreduce(memory, name="x")
    channel.allreduce(np.ones(3), name="anywhere, small")
    assert (memory == sum(range(comm.size))).all()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_rank_is_the_first_to_touch_its_own_part_of_a_window_alone(comm: Any, monkeypatch: pytest.MonkeyPatch, parts: int
                                                                    ) -> None:
    touched: list[tuple[int, int]] = []
    allocate, populate = window._allocate, window._populate
    monkeypatch.setattr(window, "_allocate", lambda file, *part: touched.append(part) or allocate(file, *part))
    monkeypatch.setattr(window, "_populate", lambda block: touched.append((block.ctypes.data, block.size)) or populate(block))
    made, reason = window.Window.make(comm, 3 * mmap.PAGESIZE - 1, parts)
    assert made is not None, reason
    part, begin = 3 * mmap.PAGESIZE, made.bytes.ctypes.data
    assert touched == [(comm.rank % parts * part, part), (begin, parts * part)]
    made.close()


def test_what_lies_elsewhere_or_has_no_kernel_goes_by_messages(make: Make, comm: Any) -> None:
    channel = make()
    memory = arena(channel, LARGE)
    for array in (np.full(LARGE, 2.0, np.float32), np.full(7, 2), np.full((3, 4), 2.0), np.full((30, LARGE), 2.0), np.zeros(0)):
        channel.allreduce(array, name="x")
        assert (array == 2 * comm.size).all()
    whole = memory.view(np.int32)
    whole[...] = comm.rank
    channel.allreduce(whole, name="whole numbers in shared memory")
    assert (whole == sum(range(comm.size))).all()


def test_many_in_flight_land_in_any_order_of_waiting(make: Make, comm: Any) -> None:
    channel = make()
    sizes = [LARGE, 0, 1, 70_000, 5, 20_000, 1, 50_000] * 5   # more than there are slots
    assert len(sizes) > 2 * SLOTS
    memory, arrays, start = arena(channel, sum(sizes)), [], 0
    for i, size in enumerate(sizes):
        inside = memory[start:start + size]
        arrays.append(inside if i % 3 else np.zeros(size, np.float32))       # some go by messages
        start += size
    for round_ in range(2):
        works = []
        for i, array in enumerate(arrays):
            array[...] = values(comm.rank, array.size, salt=i + round_)
            works.append(channel.start_allreduce(array, f"bucket {i}"))
            if (i + comm.rank) % 4 == 0:
                channel.node.progress.progress()
        for i in np.random.default_rng([comm.rank, round_]).permutation(len(works)):
            works[i].wait()
            assert works[i].done and works[i].test()
            exact = sum(values(rank, sizes[i], salt=i + round_).astype(np.float64) for rank in range(comm.size))
            assert np.abs(arrays[i] - exact).max(initial=0) < 1e-4
    assert len(channel.node.progress) == 0


def test_polling_alone_finishes_what_is_in_flight(make: Make, comm: Any) -> None:
    channel = make()
    memory = arena(channel, 4 * LARGE)
    memory[...] = comm.rank + 1
    works = [channel.start_allreduce(memory[i * LARGE:(i + 1) * LARGE], f"bucket {i}") for i in range(4)]
    while not all(work.done for work in works):
        channel.node.progress.progress()
    assert (memory == sum(range(comm.size + 1))).all()
    assert len(channel.node.progress) == 0


def test_a_thousand_small_ones_keep_their_order(make: Make, comm: Any) -> None:
    channel = make()
    array = np.zeros(3)
    for i in range(1000):
        array[...] = i, comm.rank, 1
        channel.allreduce(array, name="three numbers")
        assert (array == (i * comm.size, sum(range(comm.size)), comm.size)).all()


@pytest.mark.parametrize("place", ["window", "own"])
def test_an_array_summed_again_gives_the_sum_again(make: Make, comm: Any, place: str) -> None:
    channel = make()
    for size in (5, LARGE):
        array = arena(channel, size) if place == "window" else np.zeros(size, np.float32)
        for i in range(20):
            array[...] = values(comm.rank, size, salt=i)
            channel.allreduce(array, name="again")
            if channel.shared:
                assert array.tobytes() == folded(comm.size, size, left_fold, salt=i).tobytes() or place == "own" and size == LARGE
            np.testing.assert_allclose(array, folded(comm.size, size, left_fold, salt=i), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("crossing", ["ring", "recursive_doubling"])
def test_several_nodes_sum_inside_and_across(make: Make, comm: Any, crossing: str) -> None:
    if comm.size % 2 or comm.size < 4:
        pytest.skip("needs two nodes of two ranks")
    channel = make(color=comm.rank // 2)
    channel.cross.algorithm = crossing
    assert channel.shared and channel.node.size == 2 and channel.cross.size == comm.size // 2
    sizes = [LARGE, 50_003, 17, LARGE + 5]
    memory = arena(channel, sum(sizes))
    for round_ in range(3):
        works, start, arrays = [], 0, []
        for i, size in enumerate(sizes):
            arrays.append(memory[start:start + size])
            arrays[-1][...] = values(comm.rank, size, salt=round_)
            works.append(channel.start_allreduce(arrays[-1], f"bucket {i}"))
            start += size
        for i in np.random.default_rng([comm.rank, round_]).permutation(len(works)):
            works[i].wait()
        for size, array in zip(sizes, arrays):
            exact = sum(values(rank, size, salt=round_).astype(np.float64) for rank in range(comm.size))
            assert np.abs(array - exact).max() < 1e-4
            assert same_on_all_ranks(comm, array)
    outside = np.full(50_000, comm.rank, np.float32)
    channel.allreduce(outside, name="outside")
    assert (outside == sum(range(comm.size))).all()


def test_what_crosses_between_nodes_is_moved_by_its_work_alone(make: Make, comm: Any) -> None:
    """Two threads in one collective added an arrived part twice: whoever polls everything must not find it."""
    if comm.size % 2 or comm.size < 4:
        pytest.skip("needs two nodes of two ranks")
    channel = make(color=comm.rank // 2)
    work = channel.start_allreduce(arena(channel, LARGE), "bucket")
    while work.crossing is None and not work.done:
        work.test()
    if work.crossing is not None and not work.done:
        assert {one.channel for one in channel.node.progress.in_flight()} == {"test"}       # and not that across nodes
    work.wait()


def test_each_sum_is_reported_when_it_lands_though_others_are_in_flight(make: Make, comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("nothing is in flight")
    channel, landed = make(), []
    first, second = arena(channel, LARGE), arena(channel, LARGE)
    channel.node.progress.landed = lambda: landed.append(True)
    works = [channel.start_allreduce(first, "first")]
    at_once = works[0].done                                   # the others were here before
    if comm.rank == 0:
        works.append(channel.start_allreduce(second, "second"))
        while not works[0].done:
            channel.node.progress.progress()
        channel.node.progress.progress()
        assert (landed or at_once) and not works[1].done
    else:
        works[0].wait()
    comm.Barrier()
    if comm.rank:
        works.append(channel.start_allreduce(second, "second"))
    works[1].wait()


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_numbers_of_the_other_byte_order_are_summed_as_what_they_are(make: Make, comm: Any, dtype: str) -> None:
    channel, array = make(), np.full(10, comm.rank + 1, dtype)
    for _ in range(2):                                        # the second time an array may be known
        channel.allreduce(array, name="swapped")
        channel.messages.allreduce(array, name="swapped by messages")
    assert (array == sum(range(1, comm.size + 1)) * comm.size ** 3).all()


def test_an_array_without_dims_is_summed_too(make: Make, comm: Any) -> None:
    array = np.array(comm.rank, np.float32)
    make().allreduce(array, name="scalar")
    assert array == sum(range(comm.size))


def test_nodes_of_unequal_size_use_messages_and_say_so(make: Make, comm: Any) -> None:
    if comm.size < 3:
        pytest.skip("needs two nodes, one larger")
    channel = make(color=int(comm.rank == 0))
    assert channel.notes == [f"test: nodes have from 1 to {comm.size - 1} ranks, messages instead of shared memory"]
    array = arena(channel, LARGE)
    array[...] = 1
    channel.allreduce(array, name="x")
    assert (array == comm.size).all()


def test_one_rank_on_each_node_uses_messages_and_says_so(make: Make, comm: Any) -> None:
    if comm.size < 2:
        pytest.skip("needs two nodes")
    channel = make(color=comm.rank)
    assert channel.notes == ["test: one rank on each node, messages instead of shared memory"]
    array = arena(channel, 10)
    channel.allreduce(array, name="x")


@pytest.mark.parametrize("left", [0, 3 << 20])                # nothing at all; enough for the flags, not for the arena
def test_too_little_shared_memory_is_noticed_before_it_is_touched(make: Make, comm: Any, left: int) -> None:
    if comm.size < 2:
        pytest.skip("one rank shares with nobody")
    channel = make(free=lambda: left << 1 if comm.rank else left)              # ranks may see different numbers
    array = arena(channel, 4 << 20)
    assert len(channel.notes) == 1
    assert channel.notes[0].startswith("test: no shared memory on this node, messages instead: /dev/shm has "), channel.notes
    assert f"has {left >> 20} MiB free where " in channel.notes[0]
    array[...] = comm.rank
    channel.allreduce(array, name="x")
    assert (array == sum(range(comm.size))).all()


def test_shared_memory_missing_on_one_of_two_nodes_is_missing_on_both(make: Make, comm: Any) -> None:
    if comm.size % 2 or comm.size < 4:
        pytest.skip("needs two nodes of two ranks")
    channel = make(color=comm.rank // 2, free=lambda: 0 if comm.rank < 2 else 1 << 40)
    assert not channel.shared and len(channel.notes) == 1
    assert ("on this node" if comm.rank < 2 else "on another node") in channel.notes[0]


def test_without_a_compiler_a_cpu_that_reorders_stores_uses_messages(make: Make, comm: Any,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "kernels", lambda: None)
    monkeypatch.setattr(engine.platform, "machine", lambda: "aarch64")
    channel = make()
    if comm.size > 1:
        assert not channel.shared
    assert channel.notes == ["test: no C compiler, and this CPU may reorder stores, messages instead of shared memory"]


@pytest.mark.parametrize("difference", ["name", "size", "type", "place", "memory"])
def test_ranks_in_different_collectives_are_told_both(make: Make, comm: Any, difference: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    channel = make()
    memory = arena(channel, 3 * LARGE)
    array, name, dtype, odd = memory[:LARGE], "x", None, comm.rank == comm.size - 1
    if odd:
        array = {"size": memory[:LARGE + 16], "type": memory[:LARGE].view(np.float16), "place": memory[LARGE:2 * LARGE],
                 "memory": np.zeros(LARGE, np.float32)}.get(difference, array)
        name = "y" if difference == "name" else name
    comm.Barrier()
    at = r"rank \d is at shared collective 0, allreduce float\d\d\[\d+\] [xy].*; "
    with pytest.raises(DesyncError, match=rf'^channel "test": {at}{at}every rank must start the same collectives in the same '
                                          rf'order$'):
        channel.start_allreduce(array, name, dtype=dtype)
        while True:
            channel.node.progress.progress()
    comm.Barrier()


def test_a_strided_or_read_only_array_is_refused_before_it_loses_the_sum(make: Make, comm: Any) -> None:
    channel = make()
    with pytest.raises(AssertionError, match="contiguous"):
        channel.allreduce(np.zeros((4, 4))[:, 1], name="column")
    array = np.zeros(4)
    array.flags.writeable = False
    with pytest.raises(AssertionError, match="read-only"):
        channel.allreduce(array, name="constant")


def test_a_number_type_without_a_kernel_is_refused_by_name(make: Make, comm: Any) -> None:
    channel = make()
    if comm.size == 1:
        pytest.skip("one rank sums nothing")
    array = channel.allocate(100_000)
    with pytest.raises(ShapeError, match="sums in shared memory exist for float32, .*, not for complex32"):
        channel.start_allreduce(array, "x", dtype="complex32")
    with pytest.raises(ShapeError, match="bfloat16 is stored as uint16, but the array is float32"):
        channel.start_allreduce(array.view(np.float32), "x", dtype="bfloat16")
    with pytest.raises(ShapeError, match='bfloat16 array "x" on channel "test" cannot go by messages; let it lie in memory of'):
        channel.start_allreduce(np.zeros(100_000, np.uint16), "x", dtype="bfloat16")


def test_an_order_that_is_no_sum_of_all_is_refused(make: Make, comm: Any) -> None:
    from mpitrain.errors import ConfigError
    node = Node(comm, Progress())
    channel = Channel(comm.Dup(), "test")
    with pytest.raises(ConfigError, match="an order of summation must add up sources 0 to"):
        SharedChannel(channel, node, order=lambda n: [0, ADD])
    channel.close()
    node.close()
