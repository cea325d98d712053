"""Proves a graph of gossip for all workers at once, before anything is sent, and says how fast it makes them agree.

What runs afterwards is the table of rounds that was proved, over and over, and not the function, which could answer otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from hashlib import sha256
from numbers import Rational
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from mpitrain.errors import MpitrainError, name_and_text, place
from mpitrain.schedules.calling import answer, is_whole, shown
from mpitrain.schedules.graphs import Edge, arrivals, exchange, kept
from mpitrain.schedules.rendezvous import execute
from mpitrain.schedules.steps import ScheduleError
from mpitrain.schedules.values import Memory, Run, Symbols

Method: TypeAlias = Literal["d-psgd", "push-sum"]
METHODS = get_args(Method)
MOST_ROUNDS = 64               # A graph that says no period is asked for twice as many rounds, and has to repeat in these.
MOST_SAID = 1024               # The longest period that a graph may say.
LEAST_GAP = 1e-9               # Of the product over a period; with less, rounding is as large as what a round brings together.


class Proved(NamedTuple):
    """A graph that was proved on n workers: its rounds, which repeat, and 1 - |second eigenvalue| of their product.

    `exact`: after one period all have the mean. `slots`: the most messages that a worker receives in a round.
    """

    name: str
    n: int
    rounds: tuple[tuple[Edge, ...], ...]
    method: Method
    doubly: bool
    gap: float
    exact: bool

    @property
    def slots(self) -> int:
        return max((len(arrivals(edges, k)) for edges in self.rounds for k in range(self.n)), default=0)

    @property
    def tail(self) -> int:
        """The bytes that travel behind the parameters: the scalar of push-sum."""
        return 8 if self.method == "push-sum" else 0

    @property
    def sent(self) -> int:
        """The most messages that a worker sends in a round."""
        return max((sum(edge.source == k for edge in edges) for edges in self.rounds for k in range(self.n)), default=0)

    @property
    def digest(self) -> str:
        """SHA-256 of the rounds."""
        return sha256(repr([[(a, b, str(weight)) for a, b, weight in edges] for edges in self.rounds]).encode()).hexdigest()

    def edges(self, round: int) -> tuple[Edge, ...]:
        return self.rounds[round % len(self.rounds)]

    def __str__(self) -> str:
        """``ring on 8 workers: 2 messages a round, spectral gap 0.195``."""
        rounds = len(self.rounds)
        over = "" if rounds == 1 else f" over its {rounds} rounds"
        agree = "all workers have the mean" if self.doubly else "all workers agree"
        far = f", and {agree} after {rounds} round{'' if rounds == 1 else 's'}" if self.exact else ""
        return (f"{self.name} on {self.n} workers: {self.sent} message{'' if self.sent == 1 else 's'} a worker and round, "
                f"spectral gap {self.gap:.3g}{over}{far}")


def check_graph(graph: Callable[..., Any], n: int, period: int | None = None, *, method: Method = "d-psgd",
                name: str = "graph") -> Proved:
    """The rounds of a graph on n workers. ScheduleError unless every message has a receiver other than its sender, shares are
    positive and at most 1 in all, D-PSGD's rows add up to exactly 1, and everyone hears of everyone over a period.

    The graph repeats after `period` rounds, by default those that it says (`Graph.period`), or that are found.
    """
    rounds = _rounds(graph, n, period, name)
    for index, edges in enumerate(rounds):
        for rank in range(n):
            if (share := kept(edges, rank)) < 0:
                raise ScheduleError(f'graph "{name}", round {index} of {n} workers: worker {rank} sends {_number(1 - share)} of '
                                    "what it has; shares add up to 1 at most, and the rest is kept")
    doubly = all(_row(edges, rank) == 1 for edges in rounds for rank in range(n))
    if method == "d-psgd" and not doubly:
        index, rank = next((i, k) for i, edges in enumerate(rounds) for k in range(n) if _row(edges, k) != 1)
        raise ScheduleError(
            f'graph "{name}", round {index} of {n} workers: what worker {rank} keeps and receives adds up to '
            f'{_number(_row(rounds[index], rank))}, and D-PSGD needs exactly 1 (write thirds as Fraction(1, 3)); with method = '
            '"push-sum" it may be anything')
    _connected(rounds, n, name)
    _delivered(rounds, n, name)
    gap, exact = _gap(rounds, n)
    if n > 1 and gap < LEAST_GAP:
        raise ScheduleError(f'graph "{name}" on {n} workers: they never agree (the spectral gap is 0): workers must '
                            "keep a share of what they have, or average more often")
    return Proved(name, n, rounds, method, doubly, gap, exact)


def matrix(edges: Iterable[Edge], n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The (n, n) matrix W of a round: x_i becomes the sum over j of W[i, j] x_j."""
    edges, found = tuple(edges), np.zeros((n, n))
    for source, target, weight in edges:
        found[target, source] = weight
    for rank in range(n):
        found[rank, rank] = kept(edges, rank)
    return found


def _rounds(graph: Callable[..., Any], n: int, period: int | None, name: str) -> tuple[tuple[Edge, ...], ...]:
    """The rounds of one period."""
    said = getattr(graph, "period", None) if period is None else period
    if said is not None:
        count = said(n) if callable(said) else said
        if not is_whole(count) or not 1 <= count <= MOST_SAID:
            raise ScheduleError(f'graph "{name}": its period is a whole number of rounds from 1 to {MOST_SAID}, found '
                                f"{shown(count)}")
        return tuple(_edges(graph, index, n, name) for index in range(int(count)))
    asked = [_edges(graph, index, n, name) for index in range(2 * MOST_ROUNDS)]
    for count in range(1, MOST_ROUNDS + 1):
        if asked[count:] == asked[:-count]:
            return tuple(asked[:count])
    raise ScheduleError(f'graph "{name}" on {n} workers does not repeat within {MOST_ROUNDS} rounds, so it cannot be proved; let '
                        f"it begin anew, or say when: {getattr(graph, '__name__', 'graph')}.period = lambda n: ...")


def _edges(graph: Callable[..., Any], index: int, n: int, name: str) -> tuple[Edge, ...]:
    """The messages of one round, each of them looked at as it comes: a list without an end soon has a pair twice."""
    where = f'graph "{name}", round {index} of {n} workers'
    edges, pairs = [], set()
    for one in _listed(graph, index, n, where):
        if not isinstance(one, (tuple, list)) or len(one) != 3:
            raise ScheduleError(f"{where}: a message is (from, to, weight), found {shown(one)}")
        source, target, weight = one
        for rank in (source, target):
            if not is_whole(rank) or not 0 <= rank < n:
                raise ScheduleError(f"{where}: there is no worker {shown(rank)}; they are 0 to {n - 1} (use % n)")
        if source == target:
            raise ScheduleError(f"{where}: worker {source} sends to itself; list what goes to others, and the rest is kept")
        if (source, target) in pairs:
            raise ScheduleError(f"{where}: worker {source} sends to worker {target} twice; add the two weights up")
        pairs.add((source, target))
        edges.append(Edge(int(source), int(target), _weight(weight, source, target, where)))
    return tuple(sorted(edges))


def _listed(graph: Callable[..., Any], index: int, n: int, where: str) -> Iterator[Any]:
    """What the graph lists for a round."""
    try:
        yield from answer(graph, "round, n", index, n)
    except MpitrainError as error:
        raise ScheduleError(f"{where}: {error.message}") from error
    except Exception as error:
        raise ScheduleError(f"{where} raised {name_and_text(error, place(error))}") from error


def _weight(weight: Any, source: int, target: int, where: str) -> Fraction:
    if not isinstance(weight, (Rational, float)) or not math.isfinite(weight) or not 0 < float(weight) <= 1:
        raise ScheduleError(f"{where}: the weight from worker {source} to worker {target} is a Fraction above 0 and at most 1, "
                            f"found {shown(weight)}")
    return Fraction(weight)


def _row(edges: Sequence[Edge], rank: int) -> Fraction:
    """The weights of all that a worker keeps and receives."""
    return kept(edges, rank) + sum((edge.weight for edge in arrivals(edges, rank)), Fraction(0))


def _number(value: Fraction) -> str:
    return str(value) if value.denominator <= 1000 else f"{float(value):.17g}"


def _connected(rounds: Sequence[Sequence[Edge]], n: int, name: str) -> None:
    """ScheduleError unless there is a way from each worker to each other one over the messages of all rounds."""
    pairs = [(edge.source, edge.target) for edges in rounds for edge in edges]
    for found, words in ((_reached(pairs, n), "nothing of worker 0 ever comes to worker {}"),
                         (_reached([(b, a) for a, b in pairs], n), "nothing of worker {} ever comes to worker 0")):
        if len(found) < n:
            lost = next(rank for rank in range(n) if rank not in found)
            raise ScheduleError(f'graph "{name}" on {n} workers is not connected: {words.format(lost)} in its {len(rounds)} '
                                f"round{'' if len(rounds) == 1 else 's'}, so they would train apart")


def _reached(pairs: Sequence[tuple[int, int]], n: int) -> set[int]:
    """The workers to which there is a way from worker 0."""
    after: dict[int, list[int]] = {}
    for source, target in pairs:
        after.setdefault(source, []).append(target)
    found, left = {0}, [0]
    while left:
        for target in after.get(left.pop(), ()):
            if target not in found:
                found.add(target)
                left.append(target)
    return found


def _delivered(rounds: Sequence[Sequence[Edge]], n: int, name: str) -> None:
    """ScheduleError unless the steps of each round end, and leave each worker's arrivals where they are looked for."""
    for index, edges in enumerate(rounds):
        symbols, slots = Symbols(), max((len(arrivals(edges, rank)) for rank in range(n)), default=0)
        memories = [Memory([Run(0, 2, symbols.leaf(rank), 0)]) for rank in range(n)]
        steps = exchange(edges, slots)
        try:
            execute([steps(rank, n, 2 * (1 + slots)) for rank in range(n)], memories, 2 * (1 + slots), symbols)
        except ScheduleError as error:
            raise ScheduleError(f'graph "{name}", round {index} of {n} workers: {error.message}') from error
        for rank in range(n):
            for k, edge in enumerate(arrivals(edges, rank), 1):
                assert memories[rank].runs(2 * k, 2 * k + 2) == [Run(2 * k, 2 * k + 2, symbols.leaf(edge.source), -2 * k)]


def _gap(rounds: Sequence[Sequence[Edge]], n: int) -> tuple[float, bool]:
    """1 - |second eigenvalue| of the product of the rounds, and whether all rows of it are equal."""
    product = np.eye(n)
    for edges in rounds:
        product = matrix(edges, n) @ product
    sizes = sorted(np.abs(np.linalg.eigvals(product)))
    mean = product / product.sum(1, keepdims=True)
    return float(1 - sizes[-2]) if n > 1 else 1.0, bool(np.abs(mean - mean[0]).max() < 1e-12)
