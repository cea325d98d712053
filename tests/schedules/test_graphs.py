"""Graphs of gossip: what they bring about, against NumPy's matrices and closed formulas, and which of them are refused."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mpitrain.schedules import graphs
from mpitrain.schedules.graph_check import check_graph, matrix
from mpitrain.schedules.steps import ScheduleError

NAMES = ["ring", "torus", "exponential", "one_peer_exponential", "complete", "matching", "line", "random"]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
third, half = Fraction(1, 3), Fraction(1, 2)


def proved(name, n, method="push-sum"):
    return check_graph(getattr(graphs, name), n, method=method, name=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_graph_of_ours_is_right_on_every_number_of_workers(name):
    for n in SIZES:
        found = proved(name, n)
        for edges in found.rounds:
            assert np.allclose(matrix(edges, n).sum(0), 1, atol=1e-15), (n, edges)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_all_but_the_drawn_one_keep_the_mean(name):
    for n in SIZES:
        found = proved(name, n, "d-psgd")
        assert found.doubly
        assert all(np.allclose(matrix(edges, n).sum(1), 1, atol=1e-15) for edges in found.rounds)


@pytest.mark.parametrize("n, gap", [(4, 0.667), (8, 0.195), (16, 0.0507), (64, 0.00321)])
def test_the_gap_of_the_ring_is_that_of_the_formula(n, gap):
    found = proved("ring", n).gap
    assert found == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / n)), rel=1e-9)
    assert found == pytest.approx(gap, rel=2e-3)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_exponential_gives_the_mean_after_log2_rounds(n):
    found = proved("one_peer_exponential", n)
    product = np.eye(n)
    for edges in found.rounds:
        product = matrix(edges, n) @ product
    assert len(found.rounds) == math.log2(n) and found.exact
    assert (product == 1 / n).all()                           # powers of two: no rounding at all
    assert f"all workers have the mean after {len(found.rounds)}" in str(found)


def test_one_peer_exponential_is_off_by_a_twelfth_on_six():
    found = proved("one_peer_exponential", 6)
    product = np.eye(6)
    for edges in found.rounds:
        product = matrix(edges, 6) @ product
    assert not found.exact and np.abs(product - 1 / 6).max() == pytest.approx(1 / 12)


def test_the_matching_pairs_everyone_where_it_can():
    for n in (4, 6, 8):
        for edges in proved("matching", n).rounds:
            assert sorted(edge.source for edge in edges) == [*range(n)]
            assert {(a, b) for a, b, _ in edges} == {(b, a) for a, b, _ in edges}


def test_the_drawn_graph_is_the_same_every_time_and_needs_push_sum():
    assert proved("random", 8) == proved("random", 8)
    with pytest.raises(ScheduleError, match='adds up to .*D-PSGD needs exactly 1.*method = "push-sum"'):
        proved("random", 8, "d-psgd")


def ring_of(weight, n=4):
    def graph(round, n):
        for i in range(n):
            yield i, (i + 1) % n, weight
            yield i, (i - 1) % n, weight
    return graph


def uneven(round, n):
    for i in range(n):
        yield i, (i + 1) % n, third if i else Fraction(332, 1000)


def apart(round, n):
    for i in range(n):
        yield i, i ^ 1, half


def one_way(round, n):
    for i in range(n - 1):
        yield i, i + 1, half


def swapped(round, n):
    for i in range(n):
        yield i, (i + 1) % n, 1


def counting(round, n):
    yield 0, 1, Fraction(1, 2 + round)


def endless(round, n):
    """A loop without an end, but for who asks it for more messages than there are pairs of workers."""
    for _ in range(n * n):
        yield 0, 1, half
    raise RecursionError("it is asked for more")


def failing(round, n):
    raise KeyError("neighbour")


WRONG = [
    (uneven, "d-psgd", r"round 0 of 4 workers: what worker 0 keeps and receives adds up to 751/750"),
    (ring_of(0.333 / 0.5), "push-sum", r"worker 0 sends 1.332"),
    (lambda round, n: [(0, 4, half)], "d-psgd", r"there is no worker 4 \(int\); they are 0 to 3"),
    (lambda round, n: [(-1, 0, half)], "d-psgd", r"there is no worker -1"),
    (lambda round, n: [(1, 1, half)], "d-psgd", r"worker 1 sends to itself; list what goes to others"),
    (lambda round, n: [(0, 1, half), (0, 1, half)], "d-psgd", r"worker 0 sends to worker 1 twice"),
    (endless, "d-psgd", r"worker 0 sends to worker 1 twice"),
    (lambda round, n: [(0, 1, 0)], "d-psgd", r"the weight from worker 0 to worker 1 is a Fraction above 0"),
    (lambda round, n: [(0, 1, math.nan)], "d-psgd", r"a Fraction above 0 and at most 1, found nan"),
    (lambda round, n: [(0, 1, "1/2")], "d-psgd", r"found '1/2' \(str\)"),
    (lambda round, n: [(0, 1)], "d-psgd", r"a message is \(from, to, weight\), found \(0, 1\)"),
    (lambda round, n: None, "d-psgd", r"raised TypeError"),
    (lambda n: [], "d-psgd", r"it is called with \(round, n\), and it does not take them"),
    (apart, "d-psgd", r"is not connected: nothing of worker 0 ever comes to worker 2 in its 1 round"),
    (one_way, "push-sum", r"is not connected: nothing of worker 1 ever comes to worker 0"),
    (swapped, "d-psgd", r"they never agree \(the spectral gap is 0"),
    (counting, "push-sum", r"does not repeat within 64 rounds.*counting.period = lambda n"),
    (failing, "push-sum", r"round 0 of 4 workers raised KeyError"),
]


@pytest.mark.parametrize("graph, method, words", WRONG)
def test_a_wrong_graph_is_refused_in_one_line(graph, method, words):
    with pytest.raises(ScheduleError, match=words) as found:
        check_graph(graph, 4, method=method, name="file.py:mine")
    assert "\n" not in str(found.value) and 'graph "file.py:mine"' in str(found.value)


def test_weights_that_add_up_to_0_999_are_refused():
    def graph(round, n):
        yield 0, 1, third - Fraction(1, 1000)
        yield 0, 2, Fraction(1, 1000)
        for i in range(1, n):
            yield i, (i + 1) % n, third
    with pytest.raises(ScheduleError, match="worker 1 keeps and receives adds up to 999/1000, and D-PSGD needs exactly 1"):
        check_graph(graph, 4)
    assert not check_graph(graph, 4, method="push-sum").doubly


def test_a_third_in_binary_is_exactly_what_it_is():
    assert check_graph(ring_of(1 / 3), 4).doubly               # what is kept makes up for the rounding, exactly
    assert check_graph(ring_of(Fraction(1, 3)), 4).gap == pytest.approx(2 / 3)


def test_a_period_of_ones_own_is_found_or_said():
    def slow(round, n):
        return graphs.ring(0, n) if round // 20 % 2 else graphs.complete(0, n)
    assert len(check_graph(slow, 4).rounds) == 40
    assert len(check_graph(slow, 4, 10).rounds) == 10
    with pytest.raises(ScheduleError, match="its period is a whole number of rounds from 1 to 1024, found 0"):
        check_graph(slow, 4, 0)


def test_push_sum_keeps_both_sums_over_a_thousand_rounds():
    for name in ("random", "one_peer_exponential"):
        found, n = proved(name, 8), 8
        values, weights = np.random.default_rng(3).normal(size=(n, 5)), np.ones(n)
        total = values.sum(0)
        for round in range(1000):
            w = matrix(found.edges(round), n)
            values, weights = w @ values, w @ weights
        assert weights.sum() == pytest.approx(n, rel=1e-12)
        assert np.allclose(values.sum(0), total, rtol=1e-12, atol=1e-12)
