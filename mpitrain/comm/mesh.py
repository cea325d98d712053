"""The ranks as a named grid, by MPI's own Cartesian communicators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress
from mpitrain.schedules.grid import ALWAYS_NAMED, AXES, Grid, fit
from mpitrain.schedules.steps import Algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.shared.channel import SharedChannel
    from mpitrain.comm.shared.node import Node


class Mesh(Grid):
    """A grid whose ranks are those of a communicator: `mesh["dp"]` connects those that differ from this one along dp.

    Takes any communicator, so a job that shrank can build it again. dp=0 takes the ranks left over. All communicators are
    made here, and channels at start-up, in one order on every rank; `close` frees them. MeshError when the ranks do not fit.
    """

    def __init__(self, comm: MPI.Intracomm, **lengths: int):
        from mpi4py import MPI
        lengths = fit(comm.size, **lengths)
        self.progress = Progress()                            # all channels share it: whoever waits moves them all
        self.before = 0                                       # ranks on this host of other meshes, which have GPUs before ours
        self._grid = comm.Create_cart([*lengths.values()], periods=[False] * len(AXES), reorder=False)
        self._grid.Set_errhandler(MPI.ERRORS_RETURN)
        super().__init__(lengths, dict(zip(AXES, self._grid.Get_coords(self._grid.rank))))
        self._channels: list[Channel | SharedChannel | Link] = []
        self._nodes: list[Node] = []
        self._subsets: dict[tuple[str, ...], MPI.Cartcomm] = {}
        long = [axis for axis in AXES if self.lengths[axis] > 1]      # axes of length 1 add no rank to a subset
        for count in range(len(long) + 1):
            for names in combinations(long, count):
                self._subsets[names] = (self._grid.Sub([axis in names for axis in AXES]) if names else
                                        MPI.COMM_SELF.Create_cart([1]))      # MPICH's Sub of no axis is null on all ranks but one
                self._subsets[names].Set_errhandler(MPI.ERRORS_RETURN)

    def __getitem__(self, axes: str | Sequence[str]) -> MPI.Cartcomm:
        """The communicator of the ranks that differ from this one along `axes` only; its ranks go along them in mesh order."""
        return self._subsets[self._long(self._names(axes))]

    def channel(self, axes: str | Sequence[str], purpose: str, *, algorithm: str | Algorithm = "auto",
                wire: str | None = None) -> Channel:
        """A private duplicate of `mesh[axes]` for one purpose. Collective: every rank makes its channels in the same order."""
        names = self._names(axes)
        channel = Channel(self._subsets[self._long(names)].Dup(), self._label(names, purpose), algorithm=algorithm,
                          progress=self.progress, wire=wire)
        self._channels.append(channel)
        return channel

    def link(self, axes: str | Sequence[str], purpose: str) -> Link:
        """A link for messages between two ranks, made as `channel` is."""
        names = self._names(axes)
        link = Link(self._subsets[self._long(names)].Dup(), self._label(names, purpose), self.progress)
        self._channels.append(link)
        return link

    def share_memory(self, channel: Channel) -> SharedChannel:
        """`channel`, one of this mesh's, with memory shared between its ranks on a node. Collective over the channel.

        Its `notes` say where memory could not be shared. No array of its memory may be used after `close`.
        """
        from mpitrain.comm.shared.channel import SharedChannel
        shared = SharedChannel(channel, self.node(channel))
        self._channels[self._channels.index(channel)] = shared
        return shared

    def node(self, channel: Channel) -> Node:
        """The ranks of `channel`, one of this mesh's, on this host. Collective over the channel; `close` frees it."""
        from mpitrain.comm.shared.node import Node
        comm: Any = channel.comm                              # the channel owns a duplicate of a Cartesian one
        self._nodes.append(Node(comm, self.progress))
        return self._nodes[-1]

    def mark(self) -> tuple[int, int, int]:
        """What there is now, for `release`."""
        return len(self._channels), len(self._nodes), self.progress.watched

    def release(self, mark: tuple[int, int, int]) -> None:
        """Free channels and shared memory that were made since `mark`; collective. Nothing of them may be in flight."""
        channels, nodes, watched = mark
        self.progress.close()
        self.progress.forget(watched)
        for channel in reversed(self._channels[channels:]):
            channel.close()
        for node in reversed(self._nodes[nodes:]):
            node.close()
        del self._channels[channels:], self._nodes[nodes:]

    def close(self) -> None:
        """Free every channel, shared memory and communicator; collective."""
        self.release((0, 0, 0))
        for comm in (*self._subsets.values(), self._grid):
            comm.Free()
        self._subsets.clear()

    def abandon(self) -> None:
        """Leave a mesh that has lost a rank, where MPI has ULFM. It does not communicate: who waits for this rank here gets an
        error, by messages at once, in shared memory at the next look. Communicators are not freed, which would be collective."""
        self.revoke()
        self.progress.close()                                 # its thread reads the memory that nodes give up
        for node in self._nodes:
            node.abandon()
        self._nodes.clear()
        self._channels.clear()
        self._subsets.clear()

    def revoke(self) -> None:
        """Where MPI has ULFM, who waits for messages of this mesh gets an error, on all ranks."""
        for channel in self._channels:
            for comm in (channel.messages.comm, *([channel.cross.comm] if channel.cross is not None else [])):
                comm.Revoke()
        for comm in (*(node.comm for node in self._nodes), *self._subsets.values(), self._grid):
            if comm.size > 1:
                comm.Revoke()

    def _label(self, names: Sequence[str], purpose: str) -> str:
        return f"{'+'.join(axis for axis in names if axis in ALWAYS_NAMED or self.lengths[axis] > 1) or names[0]}:{purpose}"

    def _long(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if self.lengths[axis] > 1)

    @staticmethod
    def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
        asked = (axes,) if isinstance(axes, str) else tuple(axes)
        assert asked and set(asked) <= set(AXES), f"axes of the mesh are {AXES}, not {asked}"
        return tuple(axis for axis in AXES if axis in asked)
