"""A communicator that counts the bytes it is handed to send: what a run says of its traffic is counted where it is posted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel


class Meter:
    """Bytes and messages that a rank has posted on one communicator since the start; `abroad`: of the bytes, to other hosts."""

    def __init__(self) -> None:
        self.sent = self.abroad = self.messages = 0

    def count(self, nbytes: int, away: bool) -> None:
        self.sent += nbytes
        self.messages += 1
        if away:
            self.abroad += nbytes


@cache
def _counting() -> Any:
    """The class of communicators that count. MPI starts when it is imported, which is for others to decide."""
    from mpi4py import MPI

    class Counting(MPI.Intracomm):
        meter: Meter
        away: list[bool]                                      # of each rank, whether it is on another host

        def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
            self.meter.count(buf.nbytes, self.away[dest])
            return super().Isend(buf, dest, tag)

    return Counting


def metered(channel: Channel, hosts: Sequence[int]) -> Meter:
    """Counts what `channel` sends from now on; `hosts` has a number for the host of each of its ranks. Others need not count."""
    comm = _counting()(channel.comm)
    comm.meter, comm.away = Meter(), [host != hosts[channel.rank] for host in hosts]
    channel.comm = comm
    meter: Meter = comm.meter
    return meter
