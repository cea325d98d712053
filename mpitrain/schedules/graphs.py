"""Who sends parameters to whom in a round of gossip, and which share of each: the graphs, as functions of (round, n).

A graph yields (from, to, weight) for each message of a round among n workers, the weight an exact fraction. What a worker does
not send away it keeps, so its shares always add up to 1 (the columns of the matrix W of the round, W[to, from] = weight):

    ring of thirds, n = 4     0 -> 1, 0 -> 3: a third each, a third is kept     1 -> 2, 1 -> 0 ...     the same in every round
    one-peer exponential      round 0: i -> i + 1     round 1: i -> i + 2     round 2: i -> i + 4 ...     a half each

Where what each worker receives and keeps adds up to 1 as well (the rows), a round keeps the mean of the workers and gossip is
D-PSGD (Lian et al., 2017); else it needs push-sum (Kempe, Dobra, Gehrke, 2003; Assran et al., 2019). `graph_check.py` proves a
graph, and finds its period, before anything is sent. A user's own graph is such a function: "file.py:name".
"""

from __future__ import annotations

import math
import random as python_random
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from mpitrain.schedules.steps import Algorithm, Receive, Round, Send, data, without_empty


class Edge(NamedTuple):
    """A message of a round: `weight` of what worker `source` has goes to worker `target`."""

    source: int
    target: int
    weight: Fraction


Edges: TypeAlias = Iterable[tuple[int, int, Fraction]]
DRAWN_ROUNDS = 32              # Rounds that `random` draws; then it begins anew.


class Graph(Protocol):
    """A graph. It may have an attribute `period`, a function of n that says after how many rounds it begins anew."""

    def __call__(self, round: int, n: int, /) -> Edges: ...


G = TypeVar("G", bound=Callable[..., Edges])


def repeats(period: Callable[[int], int]) -> Callable[[G], G]:
    """Says of a graph after how many rounds it begins anew."""
    def say(graph: G) -> G:
        graph.period = period                                                # type: ignore[attr-defined]
        return graph
    return say


def hops(n: int) -> int:
    """The number of powers of two below n."""
    return max(n - 1, 0).bit_length()


@repeats(lambda n: 1)
def ring(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends a third to both neighbours (two workers: a half to each other). 1 - |second eigenvalue| is
    2/3 (1 - cos(2 pi / n)): 0.195 on 8 workers, 0.0032 on 64."""
    yield from _spread(n, lambda i: [i + 1, i - 1])


@repeats(lambda n: 1)
def torus(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends a fifth to its four neighbours on a grid that is closed in both directions, as square as n allows:
    prime numbers of workers are a ring."""
    rows = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    columns = n // rows

    def neighbours(i: int) -> list[int]:
        row, column = divmod(i, columns)
        return [row * columns + (column + 1) % columns, row * columns + (column - 1) % columns,
                (row + 1) % rows * columns + column, (row - 1) % rows * columns + column]
    yield from _spread(n, neighbours)


@repeats(lambda n: 1)
def exponential(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends to those 1, 2, 4, ... further on, equal shares: log2(n) messages a round."""
    yield from _spread(n, lambda i: [i + (1 << bit) for bit in range(hops(n))])


@repeats(lambda n: max(hops(n), 1))
def one_peer_exponential(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends a half to the one 1, then 2, then 4, ... further on: one message a round, and after log2(n) rounds all
    have the mean of all, exactly where n is a power of two (Assran et al., 2019; Ying et al., 2021)."""
    if n > 1:
        yield from _spread(n, lambda i: [i + (1 << round % hops(n))])


@repeats(lambda n: 1)
def complete(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends to all others: the mean of all in one round, and as many messages as workers."""
    yield from _spread(n, lambda i: range(n))


@repeats(lambda n: 1 if n < 3 else 2)
def matching(round: int, n: int) -> Iterator[Edge]:
    """Pairs of neighbours average, then each with its other neighbour: even workers with odd ones, a bipartite graph. Where n
    is odd one worker of each round has no partner."""
    first = round % (1 if n < 3 else 2)
    for one in range(first, n - n % 2, 2):
        if (other := (one + 1) % n) != one:
            yield Edge(one, other, Fraction(1, 2))
            yield Edge(other, one, Fraction(1, 2))


@repeats(lambda n: DRAWN_ROUNDS)
def random(round: int, n: int) -> Iterator[Edge]:
    """Each worker sends a half to another one, drawn anew in each of 32 rounds (Kempe, Dobra, Gehrke, 2003). Some receive several
    halves and some none, so it needs push-sum."""
    for i in range(n if n > 1 else 0):
        other = python_random.Random(f"{round % DRAWN_ROUNDS} {i} {n}").randrange(n - 1)
        yield Edge(i, other + (other >= i), Fraction(1, 2))


def _spread(n: int, targets: Callable[[int], Iterable[int]]) -> Iterator[Edge]:
    """Each worker keeps as much as each of its `targets` gets; numbers are modulo n, and none is meant twice, or itself."""
    for i in range(n):
        others = dict.fromkeys(target % n for target in targets(i))
        others.pop(i, None)
        for target in others:
            yield Edge(i, target, Fraction(1, len(others) + 1))


def arrivals(edges: Iterable[Edge], worker: int) -> list[Edge]:
    """The messages to a worker, by the number of who sends."""
    return sorted(edge for edge in edges if edge.target == worker)


def kept(edges: Iterable[Edge], worker: int) -> Fraction:
    """The share that a worker keeps."""
    return 1 - sum((edge.weight for edge in edges if edge.source == worker), Fraction(0))


def exchange(edges: Iterable[Edge], slots: int) -> Algorithm:
    """The messages of a round as steps over 1 + `slots` equal parts of the data: part 0 is what a worker sends, and what arrives
    from its k-th neighbour, by their numbers, lies in part 1 + k."""
    edges = tuple(edges)

    def steps(rank: int, n: int, length: int) -> Iterator[Round]:
        part = length // (1 + slots)
        yield without_empty([
            *(Receive(edge.source, data((1 + k) * part, (2 + k) * part)) for k, edge in enumerate(arrivals(edges, rank))),
            *(Send(edge.target, data(0, part)) for edge in sorted(edges) if edge.source == rank)])
    return steps
