"""A communicator that counts the bytes it is handed to send: what a run says of its traffic is counted where it is posted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel


class Meter:
    """Bytes and messages that this rank has posted on one communicator since the start; `abroad`: of those, to other hosts."""

    def __init__(self, hosts: Sequence[int] = ()):
        self.hosts = list(hosts)                              # of each rank of the communicator, by its lowest rank
        self.sent = self.abroad = self.messages = 0

    def count(self, nbytes: int, away: bool) -> None:
        self.sent += nbytes
        self.messages += 1
        if away:
            self.abroad += nbytes


class MeteredComm(MPI.Intracomm):
    """The same communicator; `Isend` is counted. Others of its ranks need not count."""

    meter: Meter
    _away: list[bool]

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        self.meter.count(buf.nbytes, self._away[dest])
        return super().Isend(buf, dest, tag)


def metered(channel: Channel, hosts: Sequence[int]) -> Meter:
    """Counts what `channel` sends from now on; `hosts` has a number for the host of each of its ranks."""
    comm = MeteredComm(channel.comm)
    comm.meter = Meter(hosts)
    comm._away = [host != hosts[channel.rank] for host in hosts]
    channel.comm = comm
    return comm.meter
