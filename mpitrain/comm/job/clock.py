"""Offsets between the clocks of ranks, so that events of several ranks can be drawn on one axis.

    rank 0   sent ---->            <---- back         Cristian (1989): the other clock was read between `sent` and `back`, so
    rank r          ----> there --->                  offset = there - (sent + back) / 2, wrong by at most (back - sent) / 2
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.lost_peer import lost_peer

ROUNDS = 16                               # the shortest round trip counts; the first ones open connections
TAG = 1


class Offset(NamedTuple):
    """Rank r's `time.perf_counter` minus rank 0's, and its largest error, in seconds (drift since then not included)."""

    seconds: float
    error: float


def clock_offsets(channel: Channel) -> list[Offset]:
    """The offset of every rank, on rank 0; an empty list on the others. Collective, with nothing in flight on the channel."""
    with lost_peer(f'comparing clocks on channel "{channel.name}"'):
        if channel.rank:
            _answer(channel)
            return []
        return [Offset(0.0, 0.0), *(_ask(channel, rank) for rank in range(1, channel.size))]


def _answer(channel: Channel) -> None:
    message = np.zeros(1)
    for _ in range(ROUNDS):
        channel.comm.Recv(message, 0, TAG)
        message[0] = perf_counter()
        channel.comm.Send(message, 0, TAG)


def _ask(channel: Channel, rank: int) -> Offset:
    message, found = np.zeros(1), []
    for _ in range(ROUNDS):
        sent = perf_counter()
        channel.comm.Send(message, rank, TAG)
        channel.comm.Recv(message, rank, TAG)
        back = perf_counter()
        found.append((back - sent, float(message[0]) - (sent + back) / 2))
    round_trip, offset = min(found)
    return Offset(offset, round_trip / 2)
