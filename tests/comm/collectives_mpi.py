"""All-reduce and broadcast over real messages: every algorithm, size and dtype, many in flight."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.messages import algorithms
from mpitrain.comm.messages.algorithms import hosts_of
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.lost_peer import lost_peer
from mpitrain.errors import ConfigError, DesyncError, PeerError
from mpitrain.schedules.collectives import ALL_REDUCE, ON_NODES
from mpitrain.schedules.steps import ScheduleError

OWN = """
from mpitrain.schedules.steps import Receive, Reduce, Send, data, inbox

def star(rank, n, length):
    everything, arrived = data(0, length), inbox(0, length)
    for peer in range(1, n):
        if rank == 0:
            yield [Receive(peer, arrived), Reduce(everything, arrived, everything)]
        elif rank == peer:
            yield [Send(0, everything)]
    if rank == 0:
        yield [Send(peer, everything) for peer in range(1, n)]
    else:
        yield [Receive(0, everything)]

def forgetful(rank, n, length):
    return (round for round in star(rank, n, length) if rank == 0)

def lazy(rank, n, length):
    if length <= 1000:
        yield from star(rank, n, length)
    elif rank == 0:
        yield [Send(peer, data(0, length)) for peer in range(1, n)]
    else:
        yield [Receive(0, data(0, length))]

def late_deadlock(rank, n, length):
    if length > 1000:
        yield [Send((rank + 1) % n, data(0, length))]
        yield [Receive((rank - 1) % n, inbox(0, length))]
    yield from star(rank, n, length)

def late_mistake(rank, n, length):
    yield from star(rank, n, length)
    if length > 1000:
        yield [Send(peer) for peer in ()] + [1 / 0]

def takes_two(rank, n):
    yield []

no_function = "ring"
"""
SIZES = [0, 1, 2, 3, 7, 1000, 4097]


@pytest.fixture(params=[*ALL_REDUCE, *ON_NODES])
def channel(comm: Any, request: pytest.FixtureRequest) -> Iterator[Channel]:
    channel = Channel(comm.Dup(), "test", algorithm=request.param)
    yield channel
    channel.close()


def values(rank: int, size: int, dtype: Any, salt: int = 0) -> np.ndarray[Any, Any]:
    """What a rank contributes; every rank can compute everyone's."""
    generator = np.random.default_rng([rank, size, salt])
    if np.issubdtype(dtype, np.integer):
        return generator.integers(-10**6, 10**6, size).astype(dtype)
    return generator.standard_normal(size).astype(dtype)


def same_on_all_ranks(comm: Any, array: np.ndarray[Any, Any]) -> bool:
    return len(set(comm.allgather(hashlib.sha256(array.tobytes()).hexdigest()))) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_allreduce_is_the_sum_and_the_same_bits_everywhere(channel: Channel, comm: Any, dtype: Any) -> None:
    for size in SIZES:
        array = values(comm.rank, size, dtype)
        channel.allreduce(array, name="x")
        everyone = np.stack([values(rank, size, dtype) for rank in range(comm.size)])
        if np.issubdtype(dtype, np.integer):
            assert (array == everyone.sum(0)).all(), size
        else:
            exact = everyone.astype(np.float64).sum(0)
            scale = np.abs(everyone.astype(np.float64)).sum(0)
            assert (np.abs(array - exact) <= comm.size * np.finfo(dtype).eps * scale).all(), size
        assert array.dtype == dtype
        assert same_on_all_ranks(comm, array), size


def test_a_million_elements(channel: Channel, comm: Any) -> None:
    array = np.arange(1_000_000, dtype=np.float32) % 1000 + comm.rank            # whole numbers, so the sum is exact
    channel.allreduce(array, name="x")
    assert (array == np.arange(1_000_000) % 1000 * comm.size + sum(range(comm.size))).all()


def test_many_in_flight_land_in_any_order_of_waiting(channel: Channel, comm: Any) -> None:
    sizes = [0, 1, 5, 70_000, 3, 20_000, 1, 50_000] * 3
    arrays = [values(comm.rank, size, np.int64, salt=i) for i, size in enumerate(sizes)]
    works = [channel.start_allreduce(array, f"bucket {i}") for i, array in enumerate(arrays)]
    order = np.random.default_rng(comm.rank).permutation(len(works))
    for i in order:
        works[i].wait()
    for i, (array, size) in enumerate(zip(arrays, sizes)):
        assert (array == sum(values(rank, size, np.int64, salt=i) for rank in range(comm.size))).all(), i
    assert len(channel.progress) == 0


def test_progress_alone_brings_a_work_to_its_end(channel: Channel, comm: Any) -> None:
    array = np.ones(10_000)
    work = channel.start_allreduce(array, "x")
    while not work.done:
        channel.progress.progress()
    assert (array == comm.size).all()


def test_what_a_sum_has_sent_has_left_when_it_is_there(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    channel = Channel(comm.Dup(), "test", algorithm="ring")
    for _ in range(3):
        work = channel.start_allreduce(np.ones(1000), "x")
        work.wait()
        assert not work._send, "MPI holds no more than the null request"
    channel.close()


def test_memory_is_reused_from_call_to_call(channel: Channel) -> None:
    array = np.ones(50_000)
    channel.allreduce(array, name="x")
    before = channel.pools.host.allocated
    for _ in range(5):
        channel.allreduce(array, name="x")
    assert channel.pools.host.allocated == before


def test_messages_longer_than_the_limit_are_split(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test", algorithm="ring", message_bytes=1000)
    array = values(comm.rank, 12_345, np.int64)
    channel.allreduce(array, name="x")
    assert (array == sum(values(rank, 12_345, np.int64) for rank in range(comm.size))).all()
    channel.close()


def test_a_sum_that_overflows_is_infinite_and_no_warning(channel: Channel, comm: Any) -> None:
    array = np.full(3, np.finfo(np.float32).max)
    channel.allreduce(array, name="x")
    assert np.isinf(array).all() == (comm.size > 1)


def test_broadcast_from_every_root(channel: Channel, comm: Any) -> None:
    for root in range(comm.size):
        for size in (0, 1, 1000):
            array = values(comm.rank, size, np.float32)
            channel.broadcast(array, root)
            assert (array == values(root, size, np.float32)).all(), (root, size)


def test_objects_travel_as_json(channel: Channel, comm: Any) -> None:
    assert channel.broadcast_object({"rank": comm.rank}, root=comm.size - 1) == {"rank": comm.size - 1}
    assert channel.gather_objects(["x" * comm.rank, comm.rank, None]) == [["x" * r, r, None] for r in range(comm.size)]
    assert channel.gather_objects("\u00e9\n") == ["\u00e9\n"] * comm.size


def test_agreement_and_barrier_pass_when_all_ranks_agree(channel: Channel) -> None:
    channel.agree({"a": [1, 2.5]}, "the configuration")
    channel.barrier()
    assert channel.gather_objects("next") == ["next"] * channel.size          # they are at the same collective still


def test_disagreement_names_the_ranks_and_both_values(channel: Channel, comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    with pytest.raises(DesyncError, match=r'^ranks disagree about the seed: rank 0 has 7, rank 1 has 8$'):
        channel.agree(8 if comm.rank == 1 else 7, "the seed")


@pytest.mark.parametrize(("name", "lost"), [
    ("ERR_PROC_FAILED", True), ("ERR_REVOKED", True), ("ERR_IN_STATUS", True), ("ERR_OTHER", True), ("ERR_TRUNCATE", False),
    ("ERR_RANK", False), ("ERR_COMM", False)])
def test_the_class_of_an_error_says_whether_a_rank_was_lost(name: str, lost: bool) -> None:
    from mpi4py import MPI
    if getattr(MPI, name) == MPI.ERR_UNKNOWN:
        pytest.skip(f"this MPI has no {name}")
    found: Any = PeerError if lost else MPI.Exception
    error = MPI.Exception(getattr(MPI, name))
    with pytest.raises(found) as caught, lost_peer("the sum"):
        raise error
    assert str(caught.value) == (f"the sum: MPI reports {error}; another rank was probably lost" if lost else str(error))


@pytest.mark.parametrize("algorithm", ["ring", "mpi"])
def test_a_wrong_call_of_mpi_is_not_called_a_lost_rank(comm: Any, algorithm: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank sends no messages")
    from mpi4py import MPI
    channel = Channel(comm.Dup(), "test", algorithm=algorithm)
    collective = channel.prepare(np.zeros(3), "x")
    channel.comm.Free()
    with pytest.raises(MPI.Exception) as caught:
        collective.run()
    assert caught.value.Get_error_class() == MPI.ERR_COMM


def test_a_users_own_algorithm_is_checked_before_its_first_message(comm: Any, mpi_tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.rank == 0:
        (mpi_tmp_path / "own.py").write_text(OWN)
    comm.Barrier()
    monkeypatch.chdir(mpi_tmp_path)
    channel = Channel(comm.Dup(), "test", algorithm="own.py:star")
    array = np.arange(5.0)
    channel.allreduce(array, name="x")
    assert (array == comm.size * np.arange(5.0)).all()
    channel.close()
    if comm.size > 1:
        with pytest.raises(ConfigError, match=r'^all-reduce "own.py:forgetful" with n=\d, length=0: deadlock: rank 0 in round 0 '
                                              "waits to receive"):
            Channel(comm, "test", algorithm="own.py:forgetful")


@pytest.mark.parametrize(("name", "message"), [
    ("lazy", r"rank 0 of \d ends with the sum of \[\(0, 0\)\] in element 0; it should be element 0 of each rank once"),
    ("late_deadlock", r"deadlock: rank 0 in round 0 waits to send data\[0:30000\] to rank 1 -> .*"),
])
def test_a_users_own_algorithm_is_proved_at_each_length_before_its_first_message(
        comm: Any, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    """Every rank refuses it, in the same words; what was right before is right afterwards."""
    if comm.size == 1:
        pytest.skip("one rank sends no messages")
    if comm.rank == 0:
        (mpi_tmp_path / "own.py").write_text(OWN)
    comm.Barrier()
    monkeypatch.chdir(mpi_tmp_path)
    channel = Channel(comm.Dup(), "test", algorithm=f"own.py:{name}")
    for _ in range(2):
        array = np.arange(1000.0)
        channel.allreduce(array, name="short")
        assert (array == comm.size * np.arange(1000.0)).all()
        with pytest.raises(ScheduleError) as caught:
            channel.start_allreduce(np.ones(30_000), "long")
        assert re.fullmatch(rf'all-reduce "own\.py:{name}" with n={comm.size}, length=30000: {message}', caught.value.message)
        assert len(set(comm.allgather(caught.value.message))) == 1
    channel.close()


@pytest.mark.parametrize(("name", "message"), [
    ("own.py:takes_two", r'all-reduce "own.py:takes_two" with n=\d, length=0: it is called with \(rank, n, length\), and it '
                         r"does not take them: takes_two\(\) takes 2 positional arguments but 3 were given"),
    ("os:getcwd", r'all-reduce "os:getcwd" with n=\d, length=0: it is called with \(rank, n, length\), and it does not take '
                  r"them: .*takes no arguments \(3 given\)"),
    ("own.py:no_function", r'all-reduce "own.py:no_function" must be a function of \(rank, n, length\) that yields rounds, found '
                           r"'ring' \(str\)"),
    ("own.py:late_mistake", r'all-reduce "own.py:late_mistake" with n=\d, length=30000 raised ZeroDivisionError at own.py:\d+ in '
                            "late_mistake: division by zero"),
])
def test_what_is_no_algorithm_is_refused_in_one_line(comm: Any, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                                     message: str) -> None:
    if comm.rank == 0:
        (mpi_tmp_path / "own.py").write_text(OWN)
    comm.Barrier()
    monkeypatch.chdir(mpi_tmp_path)
    with pytest.raises(ConfigError) as caught:
        Channel(comm.Dup(), "test", algorithm=name).allreduce(np.ones(30_000), name="x")
    assert re.fullmatch(message, caught.value.message)


@dataclass
class Star:
    """A class without a hash may be an algorithm too."""

    first: int = 0

    def __call__(self, rank: int, n: int, length: int) -> Any:
        return ALL_REDUCE["ring"](rank, n, length)


def test_an_object_may_be_an_algorithm_and_is_proved_once_for_each_length(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(comm.Dup(), "test", algorithm=Star())
    proved: list[int] = []
    prove = algorithms.prove
    monkeypatch.setattr(algorithms, "prove", lambda *arguments: (proved.append(arguments[3]), prove(*arguments)))
    for name in ("a", "b", "a"):
        for size in (500, 70_000):
            array = np.ones(size)
            channel.allreduce(array, name=name)
            assert (array == comm.size).all()
    assert proved == [500, 70_000]
    channel.close()


def test_our_own_algorithms_are_proved_by_tests_and_not_at_start(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "prove", None)
    for name in (*ALL_REDUCE, *ON_NODES):
        channel = Channel(comm.Dup(), "test", algorithm=name)
        array = np.ones(70_000)
        channel.allreduce(array, name="x")
        assert (array == comm.size).all(), name
        channel.close()


def test_an_unknown_algorithm_is_refused_when_the_channel_is_made(comm: Any) -> None:
    with pytest.raises(ConfigError, match=r'unknown all-reduce algorithm "rong" \(did you mean "ring"\?\); comm.algorithm is one '
                                          r'of auto, ring, .*, hierarchical, mpi, or your own as'):
        Channel(comm, "test", algorithm="rong")


def test_the_hierarchical_sum_is_made_for_the_ranks_of_each_host(comm: Any) -> None:
    assert hosts_of(comm) == [0] * comm.size
    two = comm.Split(comm.rank % 2)                           # no host has all ranks of `comm`, nor do these
    assert hosts_of(two) == [0] * two.size
    two.Free()


@pytest.mark.parametrize("wire", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("nodes", ["aaaaaaaa", "abababab", "aabbccdd", "aaabbbbb", "abcdefgh"])
def test_a_hierarchical_sum_over_any_nodes_is_the_same_everywhere(comm: Any, nodes: str, wire: str | None) -> None:
    channel = Channel(comm.Dup(), "test", algorithm="hierarchical", wire=wire, nodes=nodes[:comm.size])
    for size in SIZES:
        array = values(comm.rank, size, np.float32)
        channel.allreduce(array, name="x")
        everyone = np.stack([values(rank, size, np.float32) for rank in range(comm.size)]).astype(np.float64)
        near = comm.size * {None: 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[wire] * np.abs(everyone).sum(0)
        assert (np.abs(array - everyone.sum(0)) <= near).all(), size
        assert same_on_all_ranks(comm, array), size
    channel.close()


def test_a_strided_array_is_refused_before_it_loses_the_sum(channel: Channel) -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        channel.allreduce(np.zeros((4, 4))[:, 1], name="column")


def test_a_read_only_array_is_refused(channel: Channel) -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    with pytest.raises(AssertionError, match="read-only"):
        channel.allreduce(array, name="constant")
