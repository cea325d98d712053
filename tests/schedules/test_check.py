"""The checker finds what is planted for it: mismatches, circles of waiting, races, wrong sums and wrong orders."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from algorithms import own_first
from checks import check_all_gather, check_all_to_all, check_broadcast, check_reduce_scatter, check_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.schedules import calling
from mpitrain.schedules.check import ScheduleError, check_all_reduce, check_rounded, contributions
from mpitrain.schedules.collectives import ALL_REDUCE, ring
from mpitrain.schedules.rendezvous import execute
from mpitrain.schedules.ring import ring_all_gather, ring_reduce_scatter, segmented_ring
from mpitrain.schedules.steps import Algorithm, Copy, Receive, Reduce, Round, Send, Slice, data, inbox, moved
from mpitrain.schedules.values import EMPTY, LEAF, Memory, Run, Symbols


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


@pytest.mark.parametrize("name", [*ALL_REDUCE, "segments"])
def test_sixty_four_ranks_are_proved(name: str) -> None:
    """As a user's own algorithm is, at the start of a job."""
    algorithm = partial(segmented_ring, segment=1) if name == "segments" else ALL_REDUCE[name]
    for length in (0, 1, 63):
        check_all_reduce(algorithm, 64, length)


def test_equal_expressions_are_one_symbol() -> None:
    symbols = Symbols()
    a, b = symbols.leaf(0), symbols.leaf(1)
    assert symbols.sum(a, b) == symbols.sum(a, b) != symbols.sum(b, a)
    assert symbols.sum(a, b, 3) != symbols.sum(a, b)
    assert symbols.leaves(symbols.sum(symbols.sum(b, a, 3), b, 2)) == [(0, 3), (1, 0), (1, 2)]
    assert symbols.leaf(0) == a and symbols.sizes[symbols.sum(symbols.sum(b, a), b)] == 3
    assert symbols.rounded(symbols.rounded(a)) == symbols.rounded(a) != a


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2), st.integers(0, 1)), max_size=12))
def test_memory_by_runs_is_memory_by_elements(writes: list[tuple[int, int, int, int]]) -> None:
    memory, plain = Memory(), [(EMPTY, 0)] * 30
    for a, b, symbol, shift in writes:
        start, stop = sorted((a, b))
        memory.write(start, stop, [Run(start, stop, symbol, shift)] if start < stop else [])
        plain[start:stop] = [(symbol, shift)] * (stop - start)
        for low, high in ((0, 30), (start, stop), (max(0, start - 1), min(30, stop + 1))):
            runs = memory.runs(low, high)
            assert [(run.symbol, run.shift) for run in runs for _ in range(run.start, run.stop)] == plain[low:high]
            assert all(left.stop == right.start and left[2:] != right[2:] for left, right in pairwise(runs)), "too many runs"


def random_rounds(rng: random.Random, n: int, length: int) -> list[list[Round]]:
    """For each rank some rounds that run to their end: messages between two ranks at a time, then sums and copies."""
    def piece(count: int) -> Slice:
        buffer, room = rng.choice([(data, length), (inbox, 2 * length)])
        start = rng.randint(0, room - count)
        return buffer(start, start + count)

    programs: list[list[Round]] = [[[Copy(data(0, length), inbox(0, length)), Copy(data(0, length), inbox(length, 2 * length))]]
                                   for _ in range(n)]
    for _ in range(8):
        count = rng.randint(0, length)
        if rng.random() < 0.5:
            source, target = rng.sample(range(n), 2)
            programs[source].append([Send(target, piece(count))])
            programs[target].append([Receive(source, piece(count))])
        else:
            kind = rng.choice([Copy, Reduce])
            programs[rng.randrange(n)].append([kind(*(piece(count) for _ in range(2 if kind is Copy else 3)))])
    return programs


@pytest.mark.parametrize("seed", range(60))
def test_what_runs_by_runs_is_what_runs_by_elements(seed: int) -> None:
    """Beside an executor of single elements on nested tuples, in which each step is a line."""
    rng = random.Random(seed)
    n, length = 3, rng.randint(1, 12)
    programs, symbols = random_rounds(rng, n, length), Symbols()
    memories = contributions(symbols, n, length)
    execute(programs, memories, length, symbols)

    plain: list[dict[str, list[object]]] = [{"data": [(rank, i) for i in range(length)], "inbox": [None] * 2 * length}
                                            for rank in range(n)]
    def get(rank: int, part: Slice) -> list[object]:
        return plain[rank][part.buffer][part.start:part.stop]
    def put(rank: int, part: Slice, values: list[object]) -> None:
        plain[rank][part.buffer][part.start:part.stop] = values
    waiting = [list(program) for program in programs]
    while any(waiting):
        for rank, rounds in enumerate(waiting):
            step = rounds[0][0] if rounds else None
            if isinstance(step, (Copy, Reduce)):
                for step in rounds.pop(0):
                    if isinstance(step, Copy):
                        put(rank, step.into, get(rank, step.what))
                    elif isinstance(step, Reduce):
                        put(rank, step.into, list(zip(get(rank, step.left), get(rank, step.right))))
            elif isinstance(step, Send) and waiting[step.peer] and isinstance(receive := waiting[step.peer][0][0], Receive) \
                    and receive.peer == rank:
                put(step.peer, receive.into, get(rank, step.what))
                waiting[step.peer].pop(0), rounds.pop(0)

    def spelled(symbol: int, element: int) -> object:
        kind, first, second, further = symbols._parts[symbol]
        return (first, element) if kind == LEAF else (spelled(first, element), spelled(second, element + further))

    for memory, wanted in zip(memories, plain):
        assert [spelled(run.symbol, p + run.shift) for run in memory.runs(0, length) for p in range(run.start, run.stop)] \
            == wanted["data"]


@pytest.mark.parametrize("name", list(ALL_REDUCE))
def test_a_proof_costs_the_same_at_any_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in runs of memory that are written: as many for 4 billion elements as for a thousand."""
    written: list[int] = []
    write = Memory.write
    monkeypatch.setattr(Memory, "write", lambda self, a, b, runs: (written.append(len(runs)), write(self, a, b, runs))[1])
    counts = []
    for length in (1 << 10, 1 << 32):
        written.clear()
        algorithm = partial(segmented_ring, segment=length // 16) if name == "segmented_ring" else ALL_REDUCE[name]
        check_all_reduce(algorithm, 4, length)
        counts.append(sum(written))
    assert counts[0] == counts[1] > 0


def halfwrong(rank: int, n: int, length: int) -> Iterator[Round]:
    """Right up to 1000 elements; beyond, rank 1's last element is in nobody's sum."""
    yield from ring(rank, n, length if length <= 1000 else length - 1)


def middle(rank: int, n: int, length: int) -> Iterator[Round]:
    """Beyond 1000 elements, element 5 is left as it is on each rank."""
    everything, arrived = data(0, length), inbox(0, length)
    yield [Send(1 - rank, everything), Receive(1 - rank, arrived)]
    for start, stop in ((0, length),) if length <= 1000 else ((0, 5), (6, length)):
        mine, theirs = data(start, stop), inbox(start, stop)
        yield [Reduce(*((mine, theirs) if rank == 0 else (theirs, mine)), mine)]


def lazy(rank: int, n: int, length: int) -> Iterator[Round]:
    """Beyond 1000 elements everyone takes rank 0's."""
    if length <= 1000:
        yield from ring(rank, n, length)
    else:
        yield [Send(1, data(0, length))] if rank == 0 else [Receive(0, data(0, length))]


def late_deadlock(rank: int, n: int, length: int) -> Iterator[Round]:
    """From 20,000 elements on both send before they receive."""
    everything, arrived = data(0, length), inbox(0, length)
    add = Reduce(*((everything, arrived) if rank == 0 else (arrived, everything)), everything)
    if length < 20_000:
        yield [Send(1 - rank, everything), Receive(1 - rank, arrived), add]
    else:
        yield [Send(1 - rank, everything)]
        yield [Receive(1 - rank, arrived), add]


def crossed(rank: int, n: int, length: int) -> Iterator[Round]:
    """Beyond 1000 elements the sum of an element and the next one of the other rank."""
    yield [Copy(data(0, length), inbox(0, length))]
    everything, far = data(0, length), inbox(length, 2 * length)
    yield [Send(1 - rank, everything), Receive(1 - rank, far)]
    if length > 1000:
        yield [Copy(inbox(length + 1, 2 * length), inbox(length, 2 * length - 1))]
    yield [Reduce(*((everything, far) if rank == 0 else (far, everything)), everything)]


@pytest.mark.parametrize(("algorithm", "message"), [
    (halfwrong, r"rank 0 of 2 ends with the sum of \[\(0, 999999\)\] in element 999999; it should be .*"),
    (middle, r"rank 0 of 2 ends with the sum of \[\(0, 5\)\] in element 5; it should be element 5 of each rank once"),
    (lazy, r"rank 0 of 2 ends with the sum of \[\(0, 0\)\] in element 0; .*"),
    (crossed, r"rank 0 of 2 ends with the sum of \[\(0, 0\), \(1, 1\)\] in element 0; .*"),
    (late_deadlock, r"deadlock: rank 0 in round 0 waits to send data\[0:1000000\] to rank 1 -> .*"),
])
def test_what_is_wrong_only_at_some_lengths_is_found_there(algorithm: Algorithm, message: str) -> None:
    for length in (0, 1, 9, 1000):
        check_all_reduce(algorithm, 2, length)
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        check_all_reduce(algorithm, 2, 1_000_000)


@pytest.mark.parametrize("name", list(ALL_REDUCE))
def test_ours_end_alike_where_messages_are_rounded(name: str) -> None:
    for n in (1, 2, 3, 4, 5, 8):
        for length in (0, 1, 3, 1000):
            check_rounded(ALL_REDUCE[name], n, length, "bfloat16")


def test_a_sum_of_a_kept_value_on_one_rank_and_a_rounded_one_on_another_is_found() -> None:
    check_all_reduce(own_first, 2, 1000)
    with pytest.raises(ScheduleError, match=r"^ranks 0 and 1 of 2 end with different bits in element 0 where messages hold "
                                            r"bfloat16: one adds a value before it sends it, the other as it came; send values "
                                            r'before they are added, or set comm.wire_dtype = "float32"$'):
        check_rounded(own_first, 2, 1000, "bfloat16")


def no_end(rank: int, n: int, length: int) -> Iterator[Round]:
    while True:
        yield [Reduce(data(0, length), data(0, length), data(0, length))]


def yields(*rounds: Any) -> Any:
    return lambda rank, n, length: iter(rounds)


def raises_inside(rank: int, n: int, length: int) -> Any:
    return len(length)                                                         # type: ignore[arg-type]


@pytest.mark.parametrize(("algorithm", "message"), [
    (os.getcwd, r"it is called with \(rank, n, length\), and it does not take them: .*takes no arguments \(3 given\)"),
    (lambda rank, n: iter(()), r"it is called with \(rank, n, length\), and it does not take them: .* 2 positional arguments .*"),
    (lambda rank, n, length: None, "it must be a generator of rounds, lists of Send, Receive, Reduce and Copy, found None "
                                   r"instead; write yield \[\.\.\.\]"),
    (lambda rank, n, length: "abc", r"it must be a generator of rounds, .*, found 'abc' \(str\) instead; .*"),
    (yields(None), "rank 0, round 0: a round is a list of Send, Receive, Reduce and Copy, found None"),
    (yields([], 7), r"rank 0, round 1: a round is a list of Send, Receive, Reduce and Copy, found 7 \(int\)"),
    (yields(Send(1, data(0, 1))), r"rank 0, round 0: a round is a list of .*, found Send\(peer=1, .* \(Send\)"),
    (yields([(1, 2)]), r"rank 0, round 0: a step is a Send, Receive, Reduce or Copy, found \(1, 2\) \(tuple\)"),
    (yields([Send("1", data(0, 1))]), r"rank 0, round 0: the peer of a Send is the number of a rank, found '1' \(str\)"),
    (yields([Copy(data(0, 1.5), data(0, 1))]), r"rank 0, round 0: a Copy is of data\(start, stop\) or inbox\(start, stop\) with "
                                               r"whole numbers, found Slice\(.*stop=1.5\) \(Slice\)"),
    (yields([Copy(Slice("outbox", 0, 1), data(0, 1))]), r"rank 0, round 0: a Copy is of .*, found Slice\(buffer='outbox'.*"),
    (yields([Copy(inbox(-1, 1), data(0, 2))]), r"rank 0, round 0: inbox\[-1:1\] is no slice of the inbox"),
    (no_end, "rank 0 yields more than 300 rounds; it must come to an end"),
])
def test_what_is_no_algorithm_is_refused_in_words(algorithm: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MOST_ROUNDS", 300)
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        check_all_reduce(algorithm, 2, 4)


def test_a_mistake_inside_an_algorithm_is_not_taken_for_other_arguments() -> None:
    with pytest.raises(TypeError, match="has no len"):
        check_all_reduce(raises_inside, 2, 4)
