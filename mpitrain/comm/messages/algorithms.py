"""The all-reduce algorithms that a channel knows by name, and the checks of a user's own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.errors import ConfigError, MpitrainError, name_and_text, nearest, place
from mpitrain.schedules.calling import shown
from mpitrain.schedules.collectives import ALL_REDUCE, ON_NODES
from mpitrain.schedules.steps import Algorithm, ScheduleError

if TYPE_CHECKING:
    from mpi4py import MPI

LIBRARY = "mpi"                # MPI_Allreduce itself


def names() -> list[str]:
    """Every name of an all-reduce."""
    return ["auto", *ALL_REDUCE, *ON_NODES, LIBRARY]


def is_own(algorithm: str | Algorithm) -> bool:
    """Whether an all-reduce is a user's; tests prove ours."""
    return not isinstance(algorithm, str) or ":" in algorithm


def on_these_ranks(algorithm: str | Algorithm, comm: MPI.Comm, nodes: Sequence[Hashable] | None = None) -> str | Algorithm:
    """`algorithm`, imported if it is a user's, or made for the ranks' nodes (`nodes`, else their hosts) if it depends on them.
    Collective. `refuse` has refused unknown names."""
    if isinstance(algorithm, str) and algorithm in ON_NODES:
        return ON_NODES[algorithm](hosts_of(comm) if nodes is None else nodes)
    return find_own(algorithm) if isinstance(algorithm, str) and is_own(algorithm) else algorithm


def refuse(algorithm: str | Algorithm, packing: str | None, n: int) -> None:
    """ConfigError for an unknown name, or one that does not go with messages of `packing` numbers; ScheduleError for a user's
    all-reduce that is wrong on n ranks at short lengths already. Needs no MPI."""
    if isinstance(algorithm, str) and not is_own(algorithm) and algorithm not in names():
        raise ConfigError(f'unknown all-reduce algorithm "{algorithm}"{nearest(algorithm, names())}; comm.algorithm is one '
                          f'of {", ".join(names())}, or your own as "package.module:name" or "file.py:name"')
    if algorithm == LIBRARY and packing is not None:
        raise ConfigError(f'comm.algorithm = "{LIBRARY}" sends numbers as they are; for comm.wire_dtype = '
                          f'"{packing}" set another one, for instance comm.algorithm = "ring"')
    if is_own(algorithm):
        own = find_own(algorithm) if isinstance(algorithm, str) else algorithm
        for length in sorted({0, 1, n - 1, 4 * n + 1}):
            prove(own, name_of(algorithm), n, length, packing)


def find_own(name: str, folder: Path | None = None) -> Algorithm:
    """The user's function of that name; a file is looked for in `folder` first. ConfigError unless it is a function."""
    found: Algorithm = ALL_REDUCE.resolve(name, folder)
    if not callable(found):
        raise ConfigError(f'all-reduce "{name}" must be a function of (rank, n, length) that yields rounds, found {shown(found)}')
    return found


def hosts_of(comm: Any) -> list[int]:
    """The lowest rank on the host of each rank of `comm`. Collective."""
    from mpi4py import MPI
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    lowest = min(gather_numbers(host, comm.rank))
    host.Free()
    return gather_numbers(comm, lowest)


def gather_numbers(comm: Any, number: int) -> list[int]:
    """Every rank's number, in rank order. Collective; for start-up, before there is a channel."""
    found = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([number], np.int64), found)
    return [int(x) for x in found]


def prove(algorithm: Algorithm, name: str, n: int, length: int, packing: str | None = None) -> None:
    """ScheduleError unless a user's all-reduce, called `name`, is right on n ranks for arrays of `length`.

    With `packing`, messages of such 16-bit numbers are checked too. Every rank finds the same by itself.
    """
    from mpitrain.schedules.check import check_all_reduce, check_rounded
    what = f'all-reduce "{name}" with n={n}, length={length}'
    try:
        check_all_reduce(algorithm, n, length)
        if packing is not None:
            check_rounded(algorithm, n, length, packing)
    except MpitrainError as error:
        raise ScheduleError(f"{what}: {error.message}") from error
    except Exception as error:
        raise ScheduleError(f"{what} raised {name_and_text(error, place(error))}") from error


def name_of(algorithm: str | Algorithm) -> str:
    """The name as the user wrote it; of an object, as far as it tells: "file.py:name"."""
    if isinstance(algorithm, str):
        return algorithm
    name = getattr(algorithm, "__qualname__", None) or type(algorithm).__qualname__
    code = getattr(algorithm, "__code__", None)
    return name if code is None else f"{Path(code.co_filename).name}:{name}"
