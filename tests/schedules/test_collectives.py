"""Every all-reduce algorithm is proved for all ranks at once, and the checker finds what is planted for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.schedules.check import ScheduleError, check_all_reduce, check_broadcast
from mpitrain.schedules.collectives import ALL_REDUCE, SMALL_BYTES, choose, recursive_doubling, ring
from mpitrain.schedules.steps import (
    Copy,
    Receive,
    Reduce,
    Round,
    Send,
    Slice,
    data,
    inbox,
    inbox_length,
    slices_of,
)

EVERYTHING = data(0, 4)


@pytest.mark.parametrize("name", list(ALL_REDUCE))
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 33])
def test_every_algorithm_sums_every_rank_once_in_one_order(name: str, n: int, length: int) -> None:
    check_all_reduce(ALL_REDUCE[name], n, length)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 12), length=st.integers(0, 40), root=st.integers(0, 11))
def test_the_broadcast_reaches_everyone_from_any_root(n: int, length: int, root: int) -> None:
    check_broadcast(n, length, root % n)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_ring_sends_the_least_possible(n: int) -> None:
    sent = [sum(step.what.length for round_ in ring(rank, n, 10 * n) for step in round_ if isinstance(step, Send))
            for rank in range(n)]
    assert sent == [2 * (n - 1) * 10] * n


@pytest.mark.parametrize(("n", "rounds"), [(1, 0), (2, 1), (4, 2), (8, 3), (5, 4)])
def test_recursive_doubling_takes_log2_rounds_and_two_more_off_powers_of_two(n: int, rounds: int) -> None:
    assert max(len(list(recursive_doubling(rank, n, 3))) for rank in range(n)) == rounds


def test_auto_takes_recursive_doubling_for_small_arrays_and_the_ring_for_large_ones() -> None:
    assert choose("auto", 4, SMALL_BYTES) is recursive_doubling
    assert choose("auto", 4, SMALL_BYTES + 1) is ring
    assert choose("ring", 4, 1) is ring


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'^unknown all-reduce algorithm "rings" \(did you mean "ring"\?\)'):
        choose("rings", 2, 8)


def both_send_first(rank: int, n: int, length: int) -> Iterator[Round]:
    """Works only where MPI buffers the message."""
    yield [Send(1 - rank, data(0, length))]
    yield [Receive(1 - rank, inbox(0, length)), Reduce(data(0, length), inbox(0, length), data(0, length))]


def own_value_left(rank: int, n: int, length: int) -> Iterator[Round]:
    """Right sums, but a + b on one rank and b + a on the other: NaN payloads, and any deeper tree, differ."""
    everything, arrived = data(0, length), inbox(0, length)
    yield [Receive(1 - rank, arrived), Send(1 - rank, everything), Reduce(everything, arrived, everything)]


def rank_1_forgets(rank: int, n: int, length: int) -> Iterator[Round]:
    if rank == 0:
        yield [Receive(1, inbox(0, length))]


def uneven(rank: int, n: int, length: int) -> Iterator[Round]:
    if rank == 0:
        yield [Send(1, data(0, length))]
    else:
        yield [Receive(0, inbox(0, length - 1))]


def no_sum(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(1 - rank, inbox(0, length)), Send(1 - rank, data(0, length))]


def meets_in_memory(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(1 - rank, data(0, length)), Send(1 - rank, data(0, length))]


def outside(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Send(1 - rank, data(0, length + 1))]


def to_nobody(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Send(2, data(0, length))]


def reads_nothing(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Copy(inbox(0, length), data(0, length))]


def lopsided(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Reduce(data(0, length), data(0, 1), data(0, length))]


@pytest.mark.parametrize(("algorithm", "message"), [
    (both_send_first, r"deadlock: rank 0 in round 0 waits to send data\[0:4\] to rank 1; rank 1 in round 0 waits to send "
                      r"data\[0:4\] to rank 0"),
    (own_value_left, "ranks 0 and 1 of 2 add element 0 in different orders, so their bits would differ"),
    (rank_1_forgets, r"deadlock: rank 0 in round 0 waits to receive inbox\[0:4\] from rank 1"),
    (uneven, r"rank 0, round 0 sends data\[0:4\] to rank 1, which receives inbox\[0:3\] in round 0: 4 elements against 3"),
    (no_sum, r"rank 0 of 2 ends with the sum of \[\(0, 0\)\] in element 0; it should be element 0 of each rank once"),
    (meets_in_memory, r"rank 0, round 0: a message arrives in data\[0:4\] while another one uses data\[0:4\]"),
    (outside, r"rank 0, round 0: data\[0:5\] is outside a buffer of 4"),
    (to_nobody, r"rank 0, round 0: sends to rank 2 of 2"),
    (reads_nothing, r"rank 0, round 0: inbox\[0:4\] is read before anything arrived there"),
    (lopsided, r"rank 0, round 0: Reduce\(.*\) has parts of different lengths"),
])
def test_the_checker_finds(algorithm: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        check_all_reduce(algorithm, 2, 4)                                      # type: ignore[arg-type]


def test_a_broadcast_that_leaves_a_rank_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.schedules.check.binomial_broadcast", lambda rank, n, length, root: iter(()))
    with pytest.raises(ScheduleError, match="^rank 1 of 2 does not end with the data of rank 0$"):
        check_broadcast(2, 1, 0)


def test_a_step_knows_its_slices_and_a_program_its_inbox() -> None:
    steps: Round = [Send(1, EVERYTHING), Receive(1, inbox(2, 9)), Reduce(EVERYTHING, inbox(0, 4), EVERYTHING),
                    Copy(inbox(0, 4), EVERYTHING)]
    assert [len(slices_of(step)) for step in steps] == [1, 1, 3, 2]
    assert inbox_length([steps]) == 9 and inbox_length([]) == 0
    assert str(Slice("data", 1, 3)) == "data[1:3]"
