"""Times collectives of a machine with levels (cores of a node, nodes of a switch, ...) without running every rank.

Ranks of one axis of the mesh are `stride` apart. What of them lies in one node is a group of its own:

    nodes of 4, mesh dp = 4 x tp = 2         dp: 4 ranks, 2 apart      inside: 0 2 | 4 6      across: 0 4 | 2 6
        node 0   0 1 2 3                     tp: 2 ranks, 1 apart      inside: 0 1            across: nothing
        node 1   4 5 6 7

An all-reduce over levels is `hierarchical`: parts to their owners inside, a ring of each part's owners across, parts to everyone
inside. All nodes do the same at the same time, so its levels can be timed one after the other, each on a machine where all links
are alike: exact, and 3,072 ranks take microseconds where running every rank takes an hour.

Algorithms in which all ranks do alike need not be simulated either: the longest way through them has so many messages, bytes
sent and bytes added, at any size (`Way`; the tests compare each with `simulate`). Others are simulated, once for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, gcd
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.schedules.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, choose
from mpitrain.schedules.ring import SEGMENT
from mpitrain.schedules.simulate import Machine, simulate
from mpitrain.schedules.steps import Algorithm

ITEM = 4                                                      # bytes of a float32, in which pieces of algorithms are counted
REGISTRIES = {"all_reduce": ALL_REDUCE, "reduce_scatter": REDUCE_SCATTER, "all_gather": ALL_GATHER}


@dataclass(frozen=True)
class Level:
    """What messages and sums cost between ranks that have this level in common, and none further inside.

    ranks     so many ranks have it in common (8: the ranks of a node); 0: any number
    alpha     seconds of a message
    beta      seconds for each byte sent over a link
    gamma     seconds for each byte added up
    sharing   ranks of one unit of the next inner level whose messages share one link (4 GPUs behind one network card)
    """

    name: str
    ranks: int
    alpha: float
    beta: float
    gamma: float
    sharing: int = 1

    def all_reduce(self, n: int, nbytes: float) -> float | None:
        """Seconds of an all-reduce of n ranks at this level, where somebody has measured it."""
        return None

    def stream(self, n: int, nbytes: float) -> float | None:
        """The same of one of several all-reduces that are on their way together: its part of the seconds of all."""
        return None


class Way(NamedTuple):
    """The longest way through a collective: messages one after the other, and the shares of the data that are sent and added."""

    messages: float
    sent: float
    added: float

    def seconds(self, nbytes: float, machine: Machine) -> float:
        return self.messages * machine.alpha + nbytes * (self.sent * machine.beta + self.added * machine.gamma)


@cache
def ways() -> Mapping[Algorithm, Callable[[int], Way]]:
    """Ways by algorithm, as functions of the number of ranks."""
    def once(n: int) -> Way:
        return Way(n - 1, (n - 1) / n, 0.0)

    def with_sums(n: int) -> Way:
        return Way(n - 1, (n - 1) / n, (n - 1) / n)

    def both(n: int) -> Way:
        return Way(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n)

    def doubling(n: int) -> Way:
        rounds, folded = n.bit_length() - 1, bool(n & (n - 1))
        return Way(rounds + 2 * folded, rounds + 2 * folded, rounds + folded)

    def halving(n: int) -> Way:
        power = 1 << n.bit_length() - 1
        core, folded = both(power), bool(n & (n - 1))
        return Way(2 * (n.bit_length() - 1) + 2 * folded, core.sent + 2 * folded, core.added + folded)

    def tree(n: int) -> Way:
        return halving(n) if n & (n - 1) == 0 else both(n)

    return {ALL_REDUCE["ring"]: both, ALL_REDUCE["direct"]: both, ALL_REDUCE["recursive_doubling"]: doubling,
            ALL_REDUCE["halving_doubling"]: halving, ALL_REDUCE["tree"]: tree,
            REDUCE_SCATTER["ring"]: with_sums, REDUCE_SCATTER["direct"]: with_sums,
            ALL_GATHER["ring"]: once, ALL_GATHER["direct"]: once}


def flat_seconds(algorithm: Algorithm, n: int, nbytes: float, machine: Machine) -> float:
    """Seconds of a collective of n ranks with `nbytes` each, where all links are alike."""
    if n == 1 or nbytes <= 0:
        return 0.0
    if algorithm is ALL_REDUCE["segmented_ring"]:
        piece, way = n * SEGMENT * ITEM, ways()[ALL_REDUCE["ring"]](n)
        return way._replace(messages=way.messages * ceil(nbytes / piece)).seconds(nbytes, machine)
    if algorithm in ways():
        return ways()[algorithm](n).seconds(nbytes, machine)
    return simulated(algorithm, n, ceil(nbytes / ITEM), machine)


@lru_cache(maxsize=4096)
def simulated(algorithm: Algorithm, n: int, length: int, machine: Machine) -> float:
    return simulate(algorithm, n, length, ITEM, machine)


def spread_over(n: int, stride: int, levels: Sequence[Level]) -> list[int]:
    """How many of n ranks, `stride` apart, meet at each level: their product is n. ConfigError where there is no level for them.

    Of ranks that do not fill a node evenly the largest equal groups that do not cross its end count as being inside.
    """
    left, counts = n, []
    for level in levels:
        if left == 1 or level.ranks == 0:
            inside = left
        else:
            inside = gcd(left, level.ranks // stride) if level.ranks % stride == 0 else 1
        counts.append(inside)
        left, stride = left // inside, stride * inside
    if left > 1:
        raise ConfigError(f"{n} ranks do not fit the machine, whose last level {levels[-1].name} has {levels[-1].ranks} ranks; "
                          f"plan fewer ranks, or add a level to the machine")
    return counts


def level_seconds(operation: str, n: int, stride: int, nbytes: float, levels: Sequence[Level],
                  algorithm: str | Algorithm = "auto") -> float:
    """Seconds of `operation` ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") of n ranks that are `stride` apart.

    `nbytes` is the whole array: what each rank has before an all-reduce, a reduce-scatter and an all-to-all, and after an
    all-gather. "auto" and "hierarchical" go level by level; "auto" doubles distances for small parts across, as a run does. A
    further name is run by all ranks alike, at the cost of the outermost level that they cross: a ring over nodes goes through
    one link of each. All nodes and all such groups send at once.
    """
    if n == 1 or nbytes <= 0:
        return 0.0
    met = [(count, level) for count, level in zip(spread_over(n, stride, levels), levels) if count > 1]
    if operation == "all_to_all":
        return all_to_all_seconds(n, nbytes, met)
    if len(met) == 1 or algorithm not in ("auto", "hierarchical"):
        count, level = met[-1]
        if operation == "all_reduce" and algorithm == "auto" and (known := level.all_reduce(n, nbytes)) is not None:
            return known
        together = max(1.0, level.sharing * count / n)        # of the ranks behind one link, those of one group send once
        return flat_seconds(named(operation, algorithm, n, nbytes), n, nbytes, machine_of(level, together))
    seconds, part = 0.0, nbytes
    for place, (count, level) in enumerate(met):
        inner = place < len(met) - 1
        found = REGISTRIES[operation]["direct"] if inner else named(operation, algorithm, count, part)      # direct: both halves
        seconds += flat_seconds(found, count, part, machine_of(level, level.sharing))
        part /= count
    return seconds


def stream_seconds(n: int, stride: int, nbytes: float, levels: Sequence[Level]) -> float | None:
    """An all-reduce's part of the seconds of several of n ranks that are on their way together; None where nobody has measured
    it, or ranks meet at more than one level."""
    met = [level for count, level in zip(spread_over(n, stride, levels), levels) if count > 1]
    return met[0].stream(n, nbytes) if len(met) == 1 else None


def all_to_all_seconds(n: int, nbytes: float, met: Sequence[tuple[int, Level]]) -> float:
    """A rank sends everyone a part, one after the other, over the links of the level at which they meet.

    Exact where all meet at one level. Across levels it is a lower bound: messages also wait for receivers that slow ones keep
    busy, which makes 16 ranks on 2 nodes up to 60 % slower, 64 on 8 up to 10 % (the simulation of every rank).
    """
    seconds, inside = 0.0, 1
    for count, level in met:
        peers, inside = inside * (count - 1), inside * count
        machine = machine_of(level, level.sharing)
        seconds += peers * machine.alpha + nbytes * peers / n * (machine.beta + machine.gamma)
    return seconds


def machine_of(level: Level, together: float) -> Machine:
    """The links of a level, which so many ranks share."""
    return Machine(level.alpha, level.beta * together, level.gamma)


def named(operation: str, algorithm: str | Algorithm, n: int, nbytes: float) -> Algorithm:
    """The algorithm of that name, where an operation has it; "auto" is a ring for reduce-scatter and all-gather."""
    if operation == "all_reduce":
        return choose("ring" if algorithm == "hierarchical" else algorithm, n, ceil(nbytes))
    table = REGISTRIES[operation]
    return table[algorithm if isinstance(algorithm, str) and algorithm in table else "ring"]


def message_seconds(n: int, stride: int, nbytes: float, levels: Sequence[Level]) -> float:
    """Seconds of a message to the next of n ranks that are `stride` apart, where all ranks of a node send at once."""
    if n == 1 or nbytes <= 0:
        return 0.0
    level = [level for count, level in zip(spread_over(n, stride, levels), levels) if count > 1][-1]
    return level.alpha + level.beta * level.sharing * nbytes
