"""Algorithms in which everything travels around a ring: the fewest bytes, n - 1 messages one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.steps import Receive, Reduce, Round, Send, inbox, moved, part, rotating, without_empty


@rotating
def ring_reduce_scatter(rank: int, n: int, length: int) -> Iterator[Round]:
    """Partial sums of each part travel once around the ring and end at its owner; (n-1)/n of the data leaves each rank.

        n = 3, rank 0:   sends part 2   |   sends 1 with its own added   |   has 0 of everyone
    """
    right, left = (rank + 1) % n, (rank - 1) % n
    for hop in range(1, n):
        sent, grown = part(rank - hop, n, length), part(rank - hop - 1, n, length)
        arrived = inbox(0, grown.length)
        yield without_empty([Receive(left, arrived), Send(right, sent), Reduce(arrived, grown, grown)])


@rotating
def ring_all_gather(rank: int, n: int, length: int) -> Iterator[Round]:
    """Each part travels once around the ring, from its owner to everyone."""
    right, left = (rank + 1) % n, (rank - 1) % n
    for hop in range(n - 1):
        yield without_empty([Receive(left, part(rank - hop - 1, n, length)), Send(right, part(rank - hop, n, length))])


@rotating
def ring(rank: int, n: int, length: int) -> Iterator[Round]:
    """Partial sums of each part travel once around the ring, then the finished parts do (Patarasuk and Yuan, 2009).

    Each rank sends 2 (n-1)/n of the data, the least possible, in 2 (n-1) rounds: for large arrays.
    """
    yield from ring_reduce_scatter(rank, n, length)
    yield from ring_all_gather(rank, n, length)


# 524,288 elements are 2 MiB of float32: what arrives is added while the cache still holds it, and the next piece reuses its
# place. 16 MiB, 2 ranks, in one alternating run (Open MPI 5.0.11, 2 cores, 2026-11): whole 6.6 ms, 2 MiB 6.2, 1 MiB 6.6. Two
# pieces at once (1 MiB: 6.9 ms) would only crowd the cache: on one machine the processor itself moves the bytes.
SEGMENT = 1 << 19


@rotating
def segmented_ring(rank: int, n: int, length: int, segment: int = SEGMENT) -> Iterator[Round]:
    """The ring over pieces whose messages are `segment` elements long, one piece after the other."""
    piece = n * segment
    for start in range(0, length, piece):
        yield from moved(ring(rank, n, min(piece, length - start)), data_by=start)
