"""Threads per rank: the cores bound to it, shared out, pinned before the first product (their number changes bits)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from mpitrain.backend.cpu import bound_cores, cpu_limit

# A library's own variable comes before the general one: OpenBLAS and MKL read them in this order too.
CHOSEN_BY_USER = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class Place(NamedTuple):
    """A rank's CPU binding: its host, the cores bound to it, and the CPU time of its control group in cores (0: no limit)."""

    host: str
    cores: Sequence[int]
    limit: float


def place() -> Place:
    """The binding of this process; a tuple that JSON carries."""
    return Place(socket.gethostname(), bound_cores(), cpu_limit())


def on_node(places: Sequence[Sequence[Any]], rank: int) -> list[Place]:
    """The bindings of the ranks on the host of `rank`, its own first, out of those of all ranks."""
    mine = Place(*places[rank])
    return [mine, *(Place(*other) for i, other in enumerate(places) if other[0] == mine.host and i != rank)]


def pin(threads: int, node: Sequence[Place] = ()) -> int:
    """Limits BLAS and OpenMP to `threads`; 0 means the user's environment, else this rank's share of the cores.

    `node` lists the bindings of the ranks on this host, this one's first; if it is empty, this rank is alone.
    """
    from threadpoolctl import threadpool_limits

    from mpitrain.kernels.product import one_thread
    threads = threads or chosen(os.environ) or share(node or [place()])
    threadpool_limits(threads)
    one_thread.cache_clear()
    return threads


def chosen(environment: Mapping[str, Any]) -> int:
    """The thread number in the user's environment, 0 if none is usable. The first of a list ("4,2": nested loops) counts."""
    for name in CHOSEN_BY_USER:
        first = environment.get(name, "").partition(",")[0].strip()
        if first.isdigit() and int(first):
            return int(first)
    return 0


def share(node: Sequence[Place]) -> int:
    """The threads of the first rank of `node`: its part of each core bound to it, less where a control group grants less time.

    Ranks bound to separate cores get all of their own; unbound ranks share all cores of the node, or of their cpuset.
    """
    mine = node[0]
    part = sum(Fraction(1, max(1, sum(core in other.cores for other in node))) for core in mine.cores)
    if mine.limit:
        part = min(part, Fraction(mine.limit) / len(node))
    return max(1, int(part))


def granted_cores(node: Sequence[Place]) -> int:
    """The cores that the ranks of a node have together, less where a control group grants less time."""
    cores, limit = len({core for other in node for core in other.cores}), node[0].limit
    return min(cores, max(1, int(limit))) if limit else cores


def crowded(threads: int, node: Sequence[Place]) -> str:
    """A one-line warning if the ranks of a node have more threads than cores, else "". No setting is changed."""
    cores, own = len({core for other in node for core in other.cores}), len(node[0].cores)
    limit, granted, wanted = node[0].limit, granted_cores(node), threads * len(node)
    if wanted > granted:
        group = f" (its control group grants the time of {limit:g})" if limit and granted < cores else ""
        there = f"{_count(granted, 'core')} of {node[0].host}{group}"
        return (f"{wanted} threads of {_count(len(node), 'rank')} take turns on {there}: start fewer, bind them to more cores, "
                "or set train.threads lower")
    if threads > own:
        return (f"a rank's {threads} threads take turns on {_count(own, 'core')} of {node[0].host}, to which it is bound: "
                f"bind it to more, or set train.threads = {own}")
    return ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
