"""The tree over micro-batches: what its nodes are, and that every number of ranks adds in its order, proved by symbols."""

from __future__ import annotations

from functools import partial

import pytest

from mpitrain.schedules import microtree
from mpitrain.schedules.check import contributions, run
from mpitrain.schedules.microtree import Counter, are_equal, cover, halves, joins, micro_tree, nodes_of, share, width
from mpitrain.schedules.values import Run, Symbols


def binary_counter(n):
    """The tree as nested pairs: equal sums are joined as they come, the rest from the right in the end."""
    stack = []
    for leaf in range(n):
        stack.append((1, leaf))
        while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
            (a, x), (b, y) = stack[-2:]
            stack[-2:] = [(a + b, (x, y))]
    while len(stack) > 1:
        (a, x), (b, y) = stack[-2:]
        stack[-2:] = [(a + b, (x, y))]
    return stack[0][1]


def tree(node):
    return node[0] if node[1] - node[0] == 1 else tuple(map(tree, halves(node)))


@pytest.mark.parametrize("n", range(1, 70))
def test_the_tree_is_that_of_a_binary_counter(n):
    assert tree((0, n)) == binary_counter(n)


@pytest.mark.parametrize("join", [are_equal, "tree"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13, 64])
def test_a_counter_adds_in_that_order_with_few_sums(n, join):
    counter, sums, most = Counter(partial(joins, n_micro=n) if join == "tree" else join), [], 0

    def add(lower):
        above = sums.pop()
        sums[lower] = sums[lower], above

    for leaf in range(n):
        sums.append(leaf)
        most = max(most, len(sums))
        counter.push(leaf, add)
        assert len(counter.nodes) == len(sums)
    while len(sums) > 1:
        counter.fold(add)
    assert counter.nodes == [(0, n)] and sums == [binary_counter(n)] and most <= n.bit_length()


@pytest.mark.parametrize("n_micro", [1, 2, 3, 5, 6, 8, 12, 13, 16])
def test_ranks_hold_every_micro_batch_once_in_few_nodes(n_micro):
    for n in range(1, n_micro + 1):
        held = [node for nodes in nodes_of(n_micro, n) for node in nodes]
        assert [i for node in held for i in range(*node)] == list(range(n_micro))
        assert width(n_micro, n) <= max(1, 2 * (n_micro - 1).bit_length())
    assert nodes_of(n_micro, 1) == (((0, n_micro),),)


@pytest.mark.parametrize("n_micro", [1, 2, 7, 8, 12, 13])
def test_what_joins_is_what_the_tree_halves(n_micro):
    def inner(node):
        return [halves(node), *inner(halves(node)[0]), *inner(halves(node)[1])] if node[1] - node[0] > 1 else []

    pairs = {(left, right) for left, right in inner((0, n_micro))}
    neighbours = [((a, b), (b, c)) for a in range(n_micro) for b in range(a + 1, n_micro) for c in range(b + 1, n_micro + 1)]
    assert {pair for pair in neighbours if joins(*pair, n_micro)} == pairs


def test_the_cover_of_nothing_is_empty_and_that_of_a_range_is_its_largest_nodes():
    assert cover((3, 3), 8) == []
    assert cover((1, 7), 8) == [(1, 2), (2, 4), (4, 6), (6, 7)]
    assert cover((2, 5), 5) == [(2, 4), (4, 5)]
    assert [share(r, 3, 8) for r in range(3)] == [(0, 2), (2, 5), (5, 8)]


def expected(node, length, place, symbols):
    """The symbol of a node's sum, and its shift: from where its parts are held in the beginning."""
    if node in place:
        rank, slot = place[node]
        return symbols.leaf(rank), slot * length
    (left, shift), (right, other) = (expected(half, length, place, symbols) for half in halves(node))
    return symbols.sum(left, right, other - shift), shift


@pytest.mark.parametrize("whole", [0, 1 << 20])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("n_micro", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16])
def test_every_number_of_ranks_adds_in_the_order_of_the_tree(n_micro, length, whole, monkeypatch):
    """Executed for all ranks at once under rendezvous: the results are the very expressions of the tree."""
    monkeypatch.setattr(microtree, "WHOLE_ELEMENTS", whole)
    for n in [n for n in range(1, n_micro + 1) if n <= 8 or n == n_micro]:
        holders, wide = nodes_of(n_micro, n), width(n_micro, n)
        symbols = Symbols()
        results = run(partial(micro_tree, n_micro=n_micro), contributions(symbols, n, wide * length), wide * length, symbols)
        place = {node: (rank, slot) for rank, nodes in enumerate(holders) for slot, node in enumerate(nodes)}

        wanted = [Run(0, length, *expected((0, n_micro), length, place, symbols))] if length else []
        assert all(result.runs(0, length) == wanted for result in results), f"{n} ranks"


@pytest.mark.parametrize("n", [2, 4, 8])
def test_halving_moves_no_more_than_a_ring(n):
    length = 1 << 20
    for rank in range(n):
        sent = sum(step.what.length for round_ in micro_tree(rank, n, length, n) for step in round_
                   if type(step).__name__ == "Send")
        assert sent == 2 * length * (n - 1) // n


def test_data_that_are_no_whole_number_of_sums_are_our_own_mistake():
    with pytest.raises(AssertionError, match="as many sums"):
        list(partial(micro_tree, n_micro=6)(0, 2, 7))
