"""The all-reduce algorithms that a channel knows by name, and what it asks of a user's own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError, nearest
from mpitrain.schedules.check import check_all_reduce
from mpitrain.schedules.collectives import ALL_REDUCE, ON_NODES, choose
from mpitrain.schedules.steps import Algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

LIBRARY = "mpi"                # MPI_Allreduce itself


def names() -> list[str]:
    """Every name there is."""
    return ["auto", *ALL_REDUCE, *ON_NODES, LIBRARY]


def on_these_ranks(algorithm: str | Algorithm, comm: MPI.Comm, nodes: Sequence[Hashable] | None = None) -> str | Algorithm:
    """`algorithm`; one that is made for certain nodes is made for those of the ranks (`nodes`, else their hosts). Collective."""
    if not isinstance(algorithm, str) or algorithm not in ON_NODES:
        return algorithm
    return ON_NODES[algorithm](hosts_of(comm) if nodes is None else nodes)


def hosts_of(comm: Any) -> list[int]:
    """For each rank of `comm` the lowest rank on its host. Collective."""
    from mpi4py import MPI
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    lowest = host.bcast(comm.rank)
    host.Free()
    return list(comm.allgather(lowest))


def check(algorithm: str | Algorithm, n: int) -> None:
    """ConfigError for a name that is none, ScheduleError for a user's function that is wrong on n ranks."""
    if isinstance(algorithm, str) and ":" not in algorithm:
        if algorithm not in names():
            raise ConfigError(f'unknown all-reduce algorithm "{algorithm}"{nearest(algorithm, names())}; comm.algorithm is one '
                              f'of {", ".join(names())}, or your own as "package.module:name" or "file.py:name"')
        return
    for length in (0, 1, n - 1, 4 * n + 1):
        check_all_reduce(choose(algorithm, n, length), n, length)
