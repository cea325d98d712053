"""Collective algorithms for tests, as plain as can be."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.collectives import part
from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, Send, data, inbox, without_empty


def ring_reduce_scatter(rank: int, n: int, length: int) -> Iterator[Round]:
    for hop in range(1, n):
        sent, grown = part(rank - hop, n, length), part(rank - hop - 1, n, length)
        arrived = inbox(0, grown.length)
        yield without_empty([Receive((rank - 1) % n, arrived), Send((rank + 1) % n, sent), Reduce(arrived, grown, grown)])


def ring_all_gather(rank: int, n: int, length: int) -> Iterator[Round]:
    for hop in range(n - 1):
        yield without_empty([Receive((rank - 1) % n, part(rank - hop - 1, n, length)),
                             Send((rank + 1) % n, part(rank - hop, n, length))])


def all_to_all(rank: int, n: int, length: int) -> Iterator[Round]:
    others = [peer for peer in range(n) if peer != rank]
    places = {peer: inbox(*part(peer, n, length)[1:]) for peer in others}
    yield without_empty([*(Receive(peer, places[peer]) for peer in others),
                         *(Send(peer, part(peer, n, length)) for peer in others),
                         *(Copy(places[peer], part(peer, n, length)) for peer in others)])


def direct(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everyone sends part i to rank i, which adds in the order of ranks and tells everyone."""
    own = part(rank, n, length)
    others = [peer for peer in range(n) if peer != rank]
    places = {peer: inbox(own.length * i, own.length * (i + 1)) for i, peer in enumerate(others)}
    operands = [places.get(peer, own) for peer in range(n)]
    sums = [Reduce(operands[0], other, operands[0]) for other in operands[1:]]
    last = [Copy(operands[0], own)] if rank else []
    yield without_empty([*(Receive(peer, places[peer]) for peer in others),
                         *(Send(peer, part(peer, n, length)) for peer in others),
                         *sums, *last])
    yield without_empty([*(Receive(peer, part(peer, n, length)) for peer in others), *(Send(peer, own) for peer in others)])


def star(rank: int, n: int, length: int) -> Iterator[Round]:
    everything, arrived = data(0, length), inbox(0, length)
    for peer in range(1, n):
        if rank == 0:
            yield without_empty([Receive(peer, arrived), Reduce(everything, arrived, everything)])
        elif rank == peer:
            yield without_empty([Send(0, everything)])
    if rank == 0:
        yield without_empty([Send(peer, everything) for peer in range(1, n)])
    else:
        yield without_empty([Receive(0, everything)])


def own_first(rank: int, n: int, length: int) -> Iterator[Round]:
    """Two ranks, wrong where messages are rounded: rank 0 adds its own value before it sends it, rank 1 adds what came."""
    everything, arrived, kept = data(0, length), inbox(0, length), inbox(length, 2 * length)
    if rank == 0:
        yield [Receive(1, arrived), Reduce(everything, arrived, kept)]
        yield [Send(1, everything)]
        yield [Copy(kept, everything)]
    else:
        yield [Send(0, everything)]
        yield [Receive(0, arrived), Reduce(arrived, everything, everything)]
