"""Scattering, gathering, 16-bit messages and arrays, and the library's own all-reduce, over real messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from algorithms import all_to_all, direct, own_first, ring_all_gather, ring_reduce_scatter, star

from mpitrain.comm.messages import channel as channel_module
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.interpreter import PAIR_BYTES
from mpitrain.comm.messages.pair import fast_pair
from mpitrain.errors import ConfigError, DesyncError, ShapeError
from mpitrain.kernels.wire import format_of
from mpitrain.schedules.collectives import ALL_REDUCE, part
from mpitrain.schedules.steps import Copy, Reduce, data, inbox

ALGORITHMS = {**{name: name for name in ALL_REDUCE}, "direct": direct}
SIZES = [0, 1, 3, 7, 1000, 40_001]
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture
def channel(comm: Any) -> Iterator[Channel]:
    channel = Channel(comm.Dup(), "test")
    yield channel
    channel.close()


def values(rank: int, size: int, salt: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, size, salt]).standard_normal(size).astype(np.float32)


def everyone(comm: Any, size: int, salt: int = 0) -> np.ndarray:
    return np.stack([values(rank, size, salt) for rank in range(comm.size)]).astype(np.float64)


def close(found: np.ndarray, comm: Any, size: int, epsilon: float) -> bool:
    exact = everyone(comm, size)
    return bool((np.abs(found - exact.sum(0)) <= comm.size * epsilon * np.abs(exact).sum(0)).all())


def same_on_all_ranks(comm: Any, array: np.ndarray) -> bool:
    return len(set(comm.allgather(hashlib.sha256(array.tobytes()).hexdigest()))) == 1


def own_part(comm: Any, size: int) -> slice:
    mine = part(comm.rank, comm.size, size)
    return slice(mine.start, mine.stop)


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(channel: Channel, comm: Any) -> None:
    for size in SIZES:
        found = channel.reduce_scatter(array := values(comm.rank, size), ring_reduce_scatter, name="x")
        mine = own_part(comm, size)
        exact = everyone(comm, size)[:, mine]
        assert found.base is not None and found.tobytes() == array[mine].tobytes()
        assert (np.abs(found - exact.sum(0)) <= comm.size * 2.0**-23 * np.abs(exact).sum(0)).all()


def test_all_gather_brings_every_part_to_every_rank(channel: Channel, comm: Any) -> None:
    for size in SIZES:
        array = np.full(size, -1.0)
        array[own_part(comm, size)] = np.arange(size)[own_part(comm, size)]
        channel.all_gather(array, ring_all_gather, name="x")
        assert (array == np.arange(size)).all()


def test_all_to_all_swaps_parts(channel: Channel, comm: Any) -> None:
    for length in (0, 1, 1000):
        array = np.repeat(np.arange(comm.size) + comm.size * comm.rank, length).astype(np.float32)
        channel.all_to_all(array, all_to_all, name="x")
        assert (array == np.repeat(np.arange(comm.size) * comm.size + comm.rank, length)).all()


def test_all_to_all_of_unequal_parts_is_refused(channel: Channel, comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one part is always equal")
    with pytest.raises(ShapeError, match=rf'^all_to_all "x" needs a multiple of {comm.size} elements, one part for each rank, '
                                         rf"and its array has {comm.size + 1}; pad it to {2 * comm.size}$"):
        channel.all_to_all(np.zeros(comm.size + 1), all_to_all, name="x")


def test_operations_of_all_kinds_are_in_flight_together(channel: Channel, comm: Any) -> None:
    summed, scattered = values(comm.rank, 40_001), values(comm.rank, 30_000)
    gathered = np.where(np.arange(9000) // (9000 / comm.size) == comm.rank, 1.0, 0.0)
    gathered[own_part(comm, 9000)] = 1
    mine = own_part(comm, 30_000)
    works = [channel.start_allreduce(summed, "a"), channel.start_all_gather(gathered, ring_all_gather, "c"),
             channel.prepare_slice(scattered, "b", (mine.start, mine.stop), ring_reduce_scatter).start()]
    for i in np.random.default_rng(comm.rank).permutation(len(works)):
        works[i].wait()
    assert close(summed, comm, 40_001, 2.0**-23) and (gathered == 1).all()
    assert np.allclose(scattered[mine], everyone(comm, 30_000)[:, mine].sum(0), atol=1e-5)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_a_16_bit_wire_all_ranks_hold_the_same_rounded_sum(comm: Any, algorithm: str, wire: str) -> None:
    channel = Channel(comm.Dup(), "test", algorithm=ALGORITHMS[algorithm], wire=wire, message_bytes=1000)
    for size in SIZES:
        array = values(comm.rank, size)
        channel.allreduce(array, name="x")
        assert close(array, comm, size, EPSILON[wire]) and same_on_all_ranks(comm, array), size
        if comm.size > 1:
            kept, to = array.copy(), np.empty(size, np.uint16)
            format_of(wire).round(kept, to)
            assert kept.tobytes() == array.tobytes(), "not numbers of the wire's format"
    channel.close()


def test_other_dtypes_travel_as_they_are_on_a_16_bit_wire(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test", wire="bfloat16")
    wide, whole = np.full(5, 1 + 2.0**-40), np.full(5, 12_345_678, np.int64)
    channel.allreduce(wide, name="x")
    channel.allreduce(whole, name="x")
    assert (wide == comm.size * (1 + 2.0**-40)).all() and (whole == comm.size * 12_345_678).all()
    assert channel.broadcast_object([1.1, "a"]) == [1.1, "a"]
    channel.close()


@pytest.mark.parametrize("wire", [None, "float32"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_16_bit_arrays_are_summed_in_float32_and_rounded(comm: Any, kind: str, wire: str | None) -> None:
    channel = Channel(comm.Dup(), "test", wire=wire, algorithm="recursive_doubling")
    for size in SIZES:
        packed, wanted = np.empty(size, np.uint16), np.empty((comm.size, size), np.float32)
        for rank in range(comm.size):
            format_of(kind).pack(values(rank, size), packed)
            format_of(kind).unpack(packed, wanted[rank])
        format_of(kind).pack(values(comm.rank, size), packed)
        array = packed if kind == "bfloat16" else packed.view(np.float16)
        channel.allreduce(array, name="x", dtype="bfloat16" if kind == "bfloat16" else None)
        found = np.empty(size, np.float32)
        format_of(kind).unpack(array.view(np.uint16), found)
        exact, scale = wanted.astype(np.float64).sum(0), np.abs(wanted).astype(np.float64).sum(0)
        bound = (1 if wire else comm.size) * EPSILON[kind]                # rounded once, or where it was sent
        assert (np.abs(found - exact) <= bound * 1.001 * scale).all() and same_on_all_ranks(comm, array), size
    channel.close()


def test_a_dtype_that_is_not_the_arrays_is_refused(channel: Channel) -> None:
    with pytest.raises(ShapeError, match=r'^"x": dtype="bfloat16" of an array of float32; say dtype="bfloat16" of'):
        channel.allreduce(np.zeros(3, np.float32), name="x", dtype="bfloat16")
    with pytest.raises(ShapeError, match=r'^"x": dtype="float8" of an array of uint16'):
        channel.allreduce(np.zeros(3, np.uint16), name="x", dtype="float8")


def test_ranks_with_different_wires_are_found_out(comm: Any) -> None:
    if comm.size != 2:
        pytest.skip("made for two ranks")
    channel = Channel(comm.Dup(), "test", wire="bfloat16" if comm.rank == 0 else None)
    with pytest.raises(DesyncError, match=r"float32 as bfloat16\[3\] x"):
        channel.allreduce(np.zeros(3, np.float32), name="x")
    comm.Barrier()


def test_an_algorithm_that_adds_before_it_sends_is_refused_on_a_16_bit_wire(comm: Any) -> None:
    if comm.size != 2:
        pytest.skip("made for two ranks")
    Channel(comm.Dup(), "test", algorithm=own_first).close()
    with pytest.raises(ConfigError, match='^all-reduce "algorithms.py:own_first" with n=2, length=1: ranks 0 and 1 of 2 end '
                                          "with different bits in element 0 where messages hold bfloat16: one adds"):
        Channel(comm.Dup(), "test", algorithm=own_first, wire="bfloat16")


def test_the_library_sums_too_in_pieces_and_in_float32(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test", algorithm="mpi", piece_bytes=1000)
    arrays = [values(comm.rank, size) for size in SIZES]
    works = [channel.start_allreduce(array, f"bucket {i}") for i, array in enumerate(arrays)]
    for i in np.random.default_rng(comm.rank).permutation(len(works)):
        works[i].wait()
    assert all(close(array, comm, array.size, 2.0**-23) for array in arrays) and len(channel.progress) == 0
    half = np.full(100, 0.5, np.float16)
    channel.allreduce(half, name="x")
    assert (half == comm.size / 2).all()
    assert channel.gather_objects(comm.rank) == list(range(comm.size))
    channel.close()


def test_the_library_is_found_out_too_when_ranks_sum_different_things(comm: Any) -> None:
    if comm.size != 2:
        pytest.skip("made for two ranks")
    channel = Channel(comm.Dup(), "test", algorithm="mpi")
    with pytest.raises(DesyncError, match=r"^channel \"test\": rank \d is at collective 1, allreduce by MPI float64\[3\] .;"):
        channel.allreduce(np.zeros(3), name="a" if comm.rank == 0 else "b")
    comm.Barrier()


def test_the_library_takes_no_wire_format(comm: Any) -> None:
    with pytest.raises(ConfigError, match=r'^comm.algorithm = "mpi" sends numbers as they are; for comm.wire_dtype = "float16"'):
        Channel(comm, "test", algorithm="mpi", wire="float16")


def test_an_unknown_wire_is_refused_when_the_channel_is_made(comm: Any) -> None:
    with pytest.raises(ConfigError, match=r'^unknown wire format "bf16" \(did you mean "bfloat16"\?\)$'):
        Channel(comm, "test", wire="bf16")


@pytest.mark.parametrize("algorithm", ["auto", "recursive_doubling", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int8"])
def test_small_sums_are_the_same_blocking_or_not_again_and_again(comm: Any, dtype: str, algorithm: str) -> None:
    channel = Channel(comm.Dup(), "test", algorithm=algorithm)
    rng = np.random.default_rng(comm.rank)
    for size in (0, 1, 3, 100, PAIR_BYTES // 8, PAIR_BYTES // 8 + 1):
        for turn in range(4):
            array = rng.integers(-9, 9, size).astype(dtype)
            wanted = np.array(comm.allreduce(array.astype(np.float64)))
            if (turn + comm.rank) % 2:                                    # one rank blocks, its neighbour does not
                channel.allreduce(array, name="x")
            else:
                channel.start_allreduce(array, "x").wait()
            assert (array == wanted).all() and array.dtype == dtype, (size, turn)
    channel.close()


def test_a_small_sum_that_is_prepared_takes_the_short_way(channel: Channel, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size != 2 or fast_pair(comm, "x") is None:
        pytest.skip("the short way is for two ranks, and needs a C compiler and MPI handles that are pointers (not MPICH)")
    sums = [(array, channel.prepare(array, "x")) for array in (np.ones(4), np.ones(5), np.ones((2, 2)))]
    monkeypatch.setattr(channel_module, "PairWork", None)                 # nothing is ever in flight
    for turn in range(1, 4):
        for array, collective in sums:
            collective.run()
            assert (array == 2**turn).all()


def test_small_sums_may_wait_behind_others_in_flight(channel: Channel, comm: Any) -> None:
    small = np.ones(4)
    channel.allreduce(small, name="x")                                    # known from now on
    large = values(comm.rank, 40_001)
    work = channel.start_allreduce(large, "large")
    if comm.rank == 0:
        work.wait()
    channel.allreduce(small, name="x")
    work.wait()
    assert (small == comm.size**2).all() and close(large, comm, 40_001, 2.0**-23)


def test_a_known_name_with_an_array_that_does_not_fit_goes_the_other_way(channel: Channel, comm: Any) -> None:
    for _ in range(2):
        for array in (np.ones(4), np.ones(5), np.ones((2, 2)), np.ones(5, np.float32), np.ones(10_000)):
            channel.allreduce(array, name="x")
            assert (array == comm.size).all()
        with pytest.raises(AssertionError, match="contiguous"):
            channel.allreduce(np.ones((4, 4))[:, 1], name="x")
        constant = np.ones(4)
        constant.flags.writeable = False
        with pytest.raises(AssertionError, match="read-only"):
            channel.allreduce(constant, name="x")


@pytest.mark.parametrize(("dtype", "bits", "nan"), [("float32", "uint32", 0x7FC0 << 16), ("float64", "uint64", 0x7FF8 << 48)])
def test_nans_end_with_the_same_bits_whoever_blocks(channel: Channel, comm: Any, dtype: str, bits: str, nan: int) -> None:
    """As inf - inf makes them on rank 0 (negative), with a payload on others, and beside numbers; vectors and what is left."""
    sign = 1 << (8 * np.dtype(dtype).itemsize - 1)
    for turn in range(6):
        array = np.ones(37, dtype)
        array.view(bits)[:31] = nan | (sign if comm.rank == 0 else comm.rank)
        array.view(bits)[5:9] = np.ones(4, dtype).view(bits) if comm.rank else nan | 77
        if turn and (turn + comm.rank) % 2:                               # one rank in C, once it knows the array; one not
            channel.start_allreduce(array, "x").wait()
        else:
            channel.allreduce(array, name="x")
        assert np.isnan(array[:31]).all() and (array[31:] == comm.size).all() and same_on_all_ranks(comm, array)
        if comm.size == 2:
            assert (array.view(bits)[:31] == nan).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_different_small_sum_is_found_out_whoever_blocks(comm: Any, compiled: bool, turn: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size != 2:
        pytest.skip("made for two ranks")
    if not compiled:
        monkeypatch.setattr(channel_module, "fast_pair", lambda comm, name: None)
    channel = Channel(comm.Dup(), "test")
    for _ in range(turn):
        channel.allreduce(np.ones(3), name="x")
        channel.allreduce(np.ones(3), name="y")
    mine, theirs = (f"at collective {2 * turn + 1}, allreduce float64\\[3\\] {name}" for name in ("xy", "yx")[comm.rank])
    with pytest.raises(DesyncError, match=f"rank {comm.rank} is {mine}; rank {1 - comm.rank} is {theirs}; every rank must"):
        channel.allreduce(np.ones(3), name="xy"[comm.rank])
    comm.Barrier()


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_an_algorithm_may_name_empty_slices(comm: Any, wire: str | None) -> None:
    def star_with_empty(rank: int, n: int, length: int) -> Iterator[Any]:
        yield [Copy(data(0, 0), data(0, 0)), Reduce(inbox(0, 0), data(0, 0), data(0, 0))]
        yield from star(rank, n, length)
    channel = Channel(comm.Dup(), "test", algorithm=star_with_empty, wire=wire)
    for size in (0, 3):
        array = np.ones(size, np.float32)
        channel.allreduce(array, name="x")
        assert (array == comm.size).all()
    channel.close()
