"""The checker finds what is planted for it: mismatches, circles of waiting, races, wrong sums and wrong orders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain.schedules.check import (
    ScheduleError,
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_reduce_scatter,
    check_tree,
)
from mpitrain.schedules.collectives import ALL_REDUCE, ring
from mpitrain.schedules.rendezvous import Symbols
from mpitrain.schedules.ring import SegmentedRing, ring_all_gather, ring_reduce_scatter
from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, Send, data, inbox, moved


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


def from_itself(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(rank, inbox(0, length))]


def into_what_is_sent(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(1 - rank, data(1, length)), Send(1 - rank, data(0, 2))]


def two_arrive(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(1 - rank, inbox(0, length)), Receive(1 - rank, inbox(2, length + 2))]


def never_filled(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Copy(data(0, length), data(0, length))]
    yield [Reduce(data(0, length), inbox(0, length), data(0, length))]


def twice(rank: int, n: int, length: int) -> Iterator[Round]:
    everything, arrived = data(0, length), inbox(0, length)
    yield [Receive(1 - rank, arrived), Send(1 - rank, everything), Reduce(everything, arrived, everything),
           Reduce(everything, arrived, everything)]


def doubles(rank: int, n: int, length: int) -> Iterator[Round]:
    """As many leaves as nobody may write down."""
    yield [Reduce(data(0, length), data(0, length), data(0, length))] * 40


@pytest.mark.parametrize(("algorithm", "message"), [
    (both_send_first, r"deadlock: rank 0 in round 0 waits to send data\[0:4\] to rank 1 -> rank 1 in round 0 waits to send "
                      r"data\[0:4\] to rank 0 -> rank 0"),
    (own_value_left, "ranks 0 and 1 of 2 add element 0 in different orders, so their bits would differ"),
    (rank_1_forgets, r"deadlock: rank 0 in round 0 waits to receive inbox\[0:4\] from rank 1, which has ended"),
    (uneven, r"rank 0, round 0 sends data\[0:4\] to rank 1, which receives inbox\[0:3\] in round 0: 4 elements against 3"),
    (no_sum, r"rank 0 of 2 ends with the sum of \[\(0, 0\)\] in element 0; it should be element 0 of each rank once"),
    (meets_in_memory, r"rank 0, round 0: a message arrives in data\[0:4\] while another one uses data\[0:4\]"),
    (outside, r"rank 0, round 0: data\[0:5\] is outside a buffer of 4"),
    (to_nobody, r"rank 0, round 0: sends to rank 2 of 2"),
    (from_itself, r"rank 0, round 0: receives from rank 0 of 2"),
    (into_what_is_sent, r"rank 0, round 0: a message arrives in data\[1:4\] while another one uses data\[0:2\]"),
    (two_arrive, r"rank 0, round 0: a message arrives in inbox\[2:6\] while another one uses inbox\[0:4\]"),
    (never_filled, r"rank 0, round 1: inbox\[0:4\] is read before anything arrived there"),
    (twice, r"rank 0 of 2 ends with the sum of \[\(0, 0\), \(1, 0\), \(1, 0\)\] in element 0; "
            r"it should be element 0 of each rank once"),
    (doubles, r"rank 0 of 2 ends with the sum of 1099511627776 contributions in element 0; "
              r"it should be element 0 of each rank once"),
    (reads_nothing, r"rank 0, round 0: inbox\[0:4\] is read before anything arrived there"),
    (lopsided, r"rank 0, round 0: Reduce\(.*\) has parts of different lengths"),
])
def test_the_checker_finds(algorithm: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        check_all_reduce(algorithm, 2, 4)                                      # type: ignore[arg-type]


def test_a_circle_of_three_is_printed_and_nobody_else() -> None:
    """Ranks 1, 2, 3 wait for each other in a circle; rank 0 only waits for rank 1."""
    def circle(rank: int, n: int, length: int) -> Iterator[Round]:
        everything, arrived = data(0, length), inbox(0, length)
        if rank == 0:
            yield [Receive(1, arrived)]
            return
        before, after = (rank - 2) % 3 + 1, rank % 3 + 1
        if rank == 1:
            yield [Copy(everything, arrived)]
            yield [Receive(before, arrived)]
            yield [Send(after, everything), Send(0, everything)]
        else:
            yield [Receive(before, arrived)]
            yield [Send(after, everything)]

    with pytest.raises(ScheduleError, match=r"^deadlock: rank 1 in round 1 waits to receive inbox\[0:2\] from rank 3 -> "
                                            r"rank 3 in round 0 waits to receive inbox\[0:2\] from rank 2 -> "
                                            r"rank 2 in round 0 waits to receive inbox\[0:2\] from rank 1 -> rank 1$"):
        check_all_reduce(circle, 4, 2)


def test_a_broadcast_that_leaves_a_rank_out_is_found() -> None:
    def silent(rank: int, n: int, length: int, root: int = 0) -> Iterator[Round]:
        return iter(())

    with pytest.raises(ScheduleError, match="^rank 1 of 2 does not end with the data of rank 0$"):
        check_broadcast(silent, 2, 1, 0)


def test_a_reduce_scatter_whose_parts_end_elsewhere_is_found() -> None:
    def next_door(rank: int, n: int, length: int) -> Iterator[Round]:
        return moved(ring_reduce_scatter((rank + 1) % n, n, length), ranks=[(place - 1) % n for place in range(n)])

    with pytest.raises(ScheduleError, match=r"^rank 0 of 3 ends with the sum of \[\(0, 0\)\] in element 0; it should be "):
        check_reduce_scatter(next_door, 3, 3)


def test_an_all_gather_that_reads_what_it_cannot_have_is_found() -> None:
    def eager(rank: int, n: int, length: int) -> Iterator[Round]:
        yield [Receive(1 - rank, inbox(0, length)), Send(1 - rank, data(0, length))]

    with pytest.raises(ScheduleError, match=r"^rank 0, round 0: data\[0:2\] is read before anything arrived there$"):
        check_all_gather(eager, 2, 2)


def test_an_all_gather_that_leaves_a_part_out_is_found() -> None:
    def lazy(rank: int, n: int, length: int) -> Iterator[Round]:
        return (round_ for round_, _ in zip(ring_all_gather(rank, n, length), range(n - 2)))

    with pytest.raises(ScheduleError, match="^rank 0 of 4 does not end with part 1 of rank 1$"):
        check_all_gather(lazy, 4, 4)


def test_an_all_to_all_that_leaves_a_part_in_its_place_is_found() -> None:
    def stays(rank: int, n: int, length: int) -> Iterator[Round]:
        return iter(())

    with pytest.raises(ScheduleError, match="^rank 0 of 2 does not end with what rank 1 had for it in its part 1$"):
        check_all_to_all(stays, 2, 4)


def test_swapped_operands_are_told_from_the_tree() -> None:
    def swapped(rank: int, n: int, length: int) -> Iterator[Round]:
        everything, arrived = data(0, length), inbox(0, length)
        yield [Receive(1 - rank, arrived), Send(1 - rank, everything),
               Reduce(*((arrived, everything) if rank == 0 else (everything, arrived)), everything)]

    check_all_reduce(swapped, 2, 1)
    with pytest.raises(ScheduleError, match="^rank 0 of 2 does not add element 0 in the order of the binary tree over ranks$"):
        check_tree(swapped, 2, 1)


class Lanes:
    """Two rings over halves, with lanes that go wrong as asked."""

    def __init__(self, fault: str):
        self.fault = fault

    def lanes(self, rank: int, n: int, length: int) -> list[Iterator[Round]]:
        half = length // 2
        lanes = [moved(ring(rank, n, half)), moved(ring(rank, n, half), data_by=half, inbox_by=length)]
        if self.fault == "race":
            lanes[1] = moved(ring(rank, n, half), data_by=half)
        if self.fault == "missing" and rank == 1:
            lanes.pop()
        if self.fault == "crossed" and rank == 1:
            lanes.reverse()
        return lanes

    def __call__(self, rank: int, n: int, length: int) -> Iterator[Round]:
        for lane in Lanes("").lanes(rank, n, length if self.fault != "other" else length - 2):
            yield from lane


@pytest.mark.parametrize(("fault", "message"), [
    ("race", r"^rank 0: lanes 0 and 1 both use inbox\[0:2\]$"),
    ("missing", "^rank 0 of 2 has 2 lanes, rank 1 has 1$"),
    ("crossed", r"^rank 0 of 2 ends with |^lanes on 2 ranks compute something else than their rounds in turn$"),
    ("other", "^lanes on 2 ranks compute something else than their rounds in turn$"),
])
def test_lanes_that_cannot_run_at_the_same_time_are_found(fault: str, message: str) -> None:
    check_all_reduce(Lanes(""), 2, 8)
    with pytest.raises(ScheduleError, match=message):
        check_all_reduce(Lanes(fault), 2, 8)


@pytest.mark.parametrize("name", [*ALL_REDUCE, "segments"])
def test_sixty_four_ranks_are_proved(name: str) -> None:
    """As a user's own algorithm is, at the start of a job."""
    algorithm = SegmentedRing(segment=1, in_flight=2) if name == "segments" else ALL_REDUCE[name]
    for length in (0, 1, 63):
        check_all_reduce(algorithm, 64, length)


def test_equal_expressions_are_one_symbol() -> None:
    symbols = Symbols()
    a, b = symbols.leaf(0, 3), symbols.leaf(1, 3)
    assert symbols.sum(a, b) == symbols.sum(a, b) != symbols.sum(b, a)
    assert symbols.leaves(symbols.sum(symbols.sum(b, a), b)) == [(0, 3), (1, 3), (1, 3)]
    assert symbols.leaf(0, 3) == a and symbols.sizes[symbols.sum(symbols.sum(b, a), b)] == 3
