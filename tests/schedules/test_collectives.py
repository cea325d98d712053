"""Every collective algorithm is proved for all ranks at once, and moves no more than it promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from checks import check_all_gather, check_all_to_all, check_broadcast, check_reduce_scatter, check_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.schedules.check import check_all_reduce, check_sums, contributions, run
from mpitrain.schedules.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SMALL_BYTES,
    choose,
    recursive_doubling,
    ring,
)
from mpitrain.schedules.direct import OwnersToAll, SumToOwners, tree_fold
from mpitrain.schedules.hierarchical import hierarchical
from mpitrain.schedules.ring import segmented_ring
from mpitrain.schedules.steps import (
    ROTATING,
    Algorithm,
    Copy,
    Receive,
    Reduce,
    Round,
    ScheduleError,
    Send,
    Slice,
    data,
    inbox,
    moved,
    part,
    slices_of,
)
from mpitrain.schedules.values import Symbols

EVERYTHING = data(0, 4)
RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16]
LENGTHS = [0, 1, 2, 3, 7, 8, 33]
EVERY = [*((name, ALL_REDUCE[name]) for name in ALL_REDUCE),
         *((f"{name} reduce-scatter", REDUCE_SCATTER[name]) for name in REDUCE_SCATTER),
         *((f"{name} all-gather", ALL_GATHER[name]) for name in ALL_GATHER),
         *((f"{name} broadcast", BROADCAST[name]) for name in BROADCAST),
         *((f"{name} all-to-all", ALL_TO_ALL[name]) for name in ALL_TO_ALL),
         ("segmented ring of short pieces", partial(segmented_ring, segment=2))]
every_algorithm = pytest.mark.parametrize("algorithm", [algorithm for _, algorithm in EVERY], ids=[name for name, _ in EVERY])


@pytest.mark.parametrize("name", list(ALL_REDUCE))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_algorithm_sums_every_rank_once_in_one_order(name: str, n: int, length: int) -> None:
    check_all_reduce(ALL_REDUCE[name], n, length)


@pytest.mark.parametrize("name", list(REDUCE_SCATTER))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_reduce_scatter_leaves_each_rank_its_part_of_the_sum(name: str, n: int, length: int) -> None:
    check_reduce_scatter(REDUCE_SCATTER[name], n, length)


@pytest.mark.parametrize("name", list(ALL_GATHER))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_all_gather_brings_every_part_to_everyone(name: str, n: int, length: int) -> None:
    check_all_gather(ALL_GATHER[name], n, length)


@pytest.mark.parametrize("bounds", [(0, 3), (0, 3, 3), (0, 0, 7), (0, 2, 9, 12), (0, 0, 0, 5), (0, 1, 2, 3, 4, 11)])
def test_uneven_parts_are_summed_once_and_reach_everyone(bounds: tuple[int, ...]) -> None:
    n, length, symbols = len(bounds) - 1, bounds[-1], Symbols()
    for rank, result in enumerate(run(SumToOwners(bounds), contributions(symbols, n, length), length, symbols)):
        check_sums(symbols, result.runs(bounds[rank], bounds[rank + 1]), rank, n)
    results = run(OwnersToAll(bounds), contributions(symbols, n, length), length, symbols)
    first = results[0].runs(0, length)
    assert all(result.runs(0, length) == first for result in results)


@pytest.mark.parametrize("name", list(BROADCAST))
@settings(max_examples=30)
@given(n=st.integers(1, 12), length=st.integers(0, 40), root=st.integers(0, 11))
def test_every_broadcast_reaches_everyone_from_any_root(name: str, n: int, length: int, root: int) -> None:
    check_broadcast(BROADCAST[name], n, length, root % n)


@pytest.mark.parametrize("name", list(ALL_TO_ALL))
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("share", [0, 1, 3])
def test_every_all_to_all_brings_each_rank_what_was_meant_for_it(name: str, n: int, share: int) -> None:
    check_all_to_all(ALL_TO_ALL[name], n, n * share)


@pytest.mark.parametrize("name", list(ALL_TO_ALL))
def test_an_all_to_all_of_unequal_parts_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"^all-to-all on 4 ranks needs 4 equal parts, and 10 elements do not divide by 4; "
                                            r"pad the array to 12$"):
        list(ALL_TO_ALL[name](0, 4, 10))


@settings(max_examples=40)
@given(n=st.integers(1, 9), length=st.integers(0, 60), segment=st.integers(1, 5))
def test_a_segmented_ring_of_any_segments_sums_right(n: int, length: int, segment: int) -> None:
    algorithm = partial(segmented_ring, segment=segment)
    check_all_reduce(algorithm, n, length)
    assert all(step.what.length <= segment for round_ in algorithm(0, n, length) for step in round_ if isinstance(step, Send))


@settings(max_examples=60)
@given(nodes=st.lists(st.integers(0, 3), min_size=1, max_size=12), length=st.integers(0, 40))
def test_the_hierarchical_sum_is_right_on_any_nodes(nodes: list[int], length: int) -> None:
    check_all_reduce(hierarchical(nodes), len(nodes), length)


def sent(algorithm: Algorithm, n: int, length: int, crosses: Callable[[int, int], bool] = lambda a, b: True) -> list[int]:
    """How many elements each rank sends."""
    return [sum(step.what.length for round_ in algorithm(rank, n, length) for step in round_
                if isinstance(step, Send) and crosses(rank, step.peer)) for rank in range(n)]


def test_between_nodes_the_hierarchical_algorithm_sends_the_least_possible() -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert sum(sent(hierarchical(nodes), 8, 80, lambda a, b: nodes[a] != nodes[b])) == 2 * 80
    assert sum(sent(ring, 8, 80, lambda a, b: nodes[a] != nodes[b])) == 2 * 2 * 70


def test_a_hierarchical_algorithm_for_other_ranks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="^this hierarchical all-reduce was made for 4 ranks and is run by 2; give it the "
                                            "node of each of the 2 ranks$"):
        next(hierarchical("aabb")(0, 2, 1))


@pytest.mark.parametrize("n", [*range(1, 18), 31, 32])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_tree_and_direct_add_in_the_order_of_the_binary_tree_at_any_number_of_ranks(n: int, length: int) -> None:
    check_tree(ALL_REDUCE["tree"], n, length)
    check_tree(ALL_REDUCE["direct"], n, length)
    check_tree(REDUCE_SCATTER["direct"], n, length, scattered=True)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_doubling_distances_add_in_the_order_of_the_binary_tree_for_powers_of_two(n: int) -> None:
    check_tree(ALL_REDUCE["halving_doubling"], n, 40)
    check_tree(recursive_doubling, n, 40)


@pytest.mark.parametrize(("name", "n"), [("ring", 3), ("ring", 4), ("halving_doubling", 5), ("recursive_doubling", 5)])
def test_other_orders_are_told_from_the_tree(name: str, n: int) -> None:
    with pytest.raises(ScheduleError, match=rf"^rank 0 of {n} does not add element \d+ in the order of the binary tree"):
        check_tree(ALL_REDUCE[name], n, 8)


def test_the_tree_over_five_ranks_is_three_sub_trees() -> None:
    a, b, c, d, e = (data(i, i + 1) for i in range(5))
    assert tree_fold([a, b, c, d, e], c) == [Reduce(a, b, a), Reduce(c, d, c), Reduce(a, c, a), Reduce(a, e, c)]


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
    assert choose("auto", 4, SMALL_BYTES + 1) is segmented_ring
    assert choose("ring", 4, 1) is ring


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'^unknown all-reduce algorithm "rings" \(did you mean "ring"\?\)'):
        choose("rings", 2, 8)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["segmented_ring", "halving_doubling", "direct", "tree"])
def test_the_others_for_large_arrays_send_no_more_than_the_ring(name: str, n: int) -> None:
    assert sent(ALL_REDUCE[name], n, 10 * n) == [2 * (n - 1) * 10] * n


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("algorithm", [*map(REDUCE_SCATTER.__getitem__, REDUCE_SCATTER), *map(ALL_GATHER.__getitem__, ALL_GATHER),
                                       *map(ALL_TO_ALL.__getitem__, ALL_TO_ALL)])
def test_one_way_everything_is_sent_once(algorithm: Algorithm, n: int) -> None:
    assert sent(algorithm, n, 10 * n) == [(n - 1) * 10] * n


@every_algorithm
def test_more_elements_than_32_bits_count_are_plain_integers(algorithm: Algorithm) -> None:
    """The rounds of 5 ranks touch nothing outside the array, and between two ranks the same lengths are sent and received."""
    n, length = 5, 5 * 2**31 + 5 * 13
    if isinstance(algorithm, partial) or algorithm is segmented_ring:
        algorithm = partial(segmented_ring, segment=1 << 28)
    messages: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(n):
        for step in (step for round_ in algorithm(rank, n, length) for step in round_):
            if isinstance(step, (Send, Receive)):
                pair = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
                messages.setdefault((type(step).__name__, *pair), []).append(slices_of(step)[0].length)
            assert all(0 <= piece.start <= piece.stop <= length for piece in slices_of(step))
    assert messages and all(messages["Receive", source, target] == lengths for (kind, source, target), lengths in messages.items()
                            if kind == "Send")


@every_algorithm
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_those_marked_as_rotating_do_the_same_on_every_rank(algorithm: Algorithm, n: int) -> None:
    def relative(rank: int) -> list[list[object]]:
        """A rank's rounds, peers counted from it, memory by length alone; the arithmetic of a round as a whole."""
        rounds = list(algorithm(rank, n, 6 * n))
        return [[*((type(step), (step.peer - rank) % n, slices_of(step)[0].length) for step in round_
                   if isinstance(step, (Send, Receive))),
                 sum(slices_of(step)[-1].length for step in round_ if isinstance(step, (Reduce, Copy)))] for round_ in rounds]

    if algorithm in ROTATING:
        assert all(relative(rank) == relative(0) for rank in range(n))


def test_rings_and_direct_algorithms_are_marked_as_rotating() -> None:
    assert {name for name, algorithm in EVERY if algorithm in ROTATING} == {
        "ring", "segmented_ring", "direct", "ring reduce-scatter", "direct reduce-scatter", "ring all-gather",
        "direct all-gather", "direct all-to-all"}
    assert segmented_ring in ROTATING


def test_a_step_knows_its_slices() -> None:
    steps: Round = [Send(1, EVERYTHING), Receive(1, inbox(2, 9)), Reduce(EVERYTHING, inbox(0, 4), EVERYTHING),
                    Copy(inbox(0, 4), EVERYTHING)]
    assert [len(slices_of(step)) for step in steps] == [1, 1, 3, 2]
    assert str(Slice("data", 1, 3)) == "data[1:3]"


def test_rounds_can_be_moved_to_other_ranks_and_memory() -> None:
    steps: Round = [Send(1, EVERYTHING), Receive(0, inbox(0, 4)), Reduce(EVERYTHING, inbox(0, 4), EVERYTHING),
                    Copy(inbox(0, 4), EVERYTHING)]
    up, scratch = data(10, 14), inbox(3, 7)
    assert list(moved([steps], ranks=[5, 7], data_by=10, inbox_by=3)) == [
        [Send(7, up), Receive(5, scratch), Reduce(up, scratch, up), Copy(scratch, up)]]
    assert list(moved([steps])) == [steps]


@settings(max_examples=50)
@given(n=st.integers(1, 20), length=st.integers(0, 2**40))
def test_parts_are_almost_equal_and_make_up_the_whole(n: int, length: int) -> None:
    cut = [part(i, n, length) for i in range(n)]
    assert cut[0].start == 0 and cut[-1].stop == length and all(a.stop == b.start for a, b in pairwise(cut))
    assert max(p.length for p in cut) - min(p.length for p in cut) <= 1
    assert part(n + 1, n, length) == part(1, n, length)
