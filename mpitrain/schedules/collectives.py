"""All-reduce and broadcast algorithms: short generators of plain-data rounds, one rank's view each.

Every all-reduce here gives the same bits on every rank: either one rank computes a part and the others receive it (ring), or
both partners add the same two values in the same order, the lower rank's on the left (recursive doubling).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.registry import Registry
from mpitrain.schedules.steps import Algorithm, Receive, Reduce, Round, Send, Slice, data, inbox, without_empty

ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")


def part(index: int, n: int, length: int) -> Slice:
    """Part `index` (modulo n) of `length` elements cut into n almost equal ones, some empty when length < n."""
    index %= n
    return data(index * length // n, (index + 1) * length // n)


@ALL_REDUCE.register("ring")
def ring(rank: int, n: int, length: int) -> Iterator[Round]:
    """Partial sums of each part travel once around the ring, then the finished parts do (Patarasuk and Yuan, 2009).

    Each rank sends 2 (n-1)/n of the data, the least possible, in 2 (n-1) rounds: for large arrays.
    """
    right, left = (rank + 1) % n, (rank - 1) % n
    for hop in range(n - 1):
        sent, grown = part(rank - hop, n, length), part(rank - hop - 1, n, length)
        arrived = inbox(0, grown.length)
        yield without_empty([Receive(left, arrived), Send(right, sent), Reduce(arrived, grown, grown)])
    for hop in range(n - 1):
        yield without_empty([Receive(left, part(rank - hop, n, length)), Send(right, part(rank + 1 - hop, n, length))])


@ALL_REDUCE.register("recursive_doubling")
def recursive_doubling(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everything is exchanged with partners at distance 1, 2, 4, ... (Thakur et al., 2005): log2(n) rounds, for small arrays.

    When n is no power of two, the first 2 (n - p) ranks (p: the power below n) pair up first, the even one hands its data to
    the odd one, sits out, and is told the result:

        n = 5:   0 -> 1   |   (1, 2, 3, 4) double   |   1 -> 0
    """
    everything, arrived = data(0, length), inbox(0, length)
    power = 1 << (n.bit_length() - 1)
    paired = 2 * (n - power)
    if rank < paired and rank % 2 == 0:
        yield without_empty([Send(rank + 1, everything)])
        yield without_empty([Receive(rank + 1, everything)])
        return
    if rank < paired:
        yield without_empty([Receive(rank - 1, arrived), Reduce(arrived, everything, everything)])
    place = rank // 2 if rank < paired else rank - paired // 2
    distance = 1
    while distance < power:
        partner = place ^ distance
        peer = 2 * partner + 1 if partner < paired // 2 else partner + paired // 2
        left, right = (arrived, everything) if peer < rank else (everything, arrived)
        yield without_empty([Receive(peer, arrived), Send(peer, everything), Reduce(left, right, everything)])
        distance *= 2
    if rank < paired:
        yield without_empty([Send(rank - 1, everything)])


def binomial_broadcast(rank: int, n: int, length: int, root: int = 0) -> Iterator[Round]:
    """Whoever has the data hands it to a rank half the remaining distance away: log2(n) rounds.

        n = 8, root 0:   0 -> 4   |   0 -> 2, 4 -> 6   |   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    """
    place, everything = (rank - root) % n, data(0, length)
    distance = 1 << (n - 1).bit_length() >> 1
    while distance:
        if place % (2 * distance) == 0 and place + distance < n:
            yield without_empty([Send((rank + distance) % n, everything)])
        elif place % (2 * distance) == distance:
            yield without_empty([Receive((rank - distance) % n, everything)])
        distance //= 2


# Where the ring begins to win. Open MPI 5.0.11, shared memory, float32, medians in us, recursive doubling against ring:
# 2 ranks 64 KiB 130:158, 256 KiB 220:226, 512 KiB 325:297; 4 ranks on 2 cores 256 KiB 1505:2637, 16 MiB 47408:34935.
SMALL_BYTES = 256 << 10


def choose(name: str | Algorithm, n: int, nbytes: int) -> Algorithm:
    """The algorithm a name stands for; "auto" takes recursive doubling up to SMALL_BYTES and the ring above."""
    if not isinstance(name, str):
        return name
    if name == "auto":
        name = "recursive_doubling" if nbytes <= SMALL_BYTES else "ring"
    return ALL_REDUCE.resolve(name)
