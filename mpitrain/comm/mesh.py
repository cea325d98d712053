"""The ranks as a named grid, by MPI's own Cartesian communicators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from mpitrain.comm.channel import Channel
from mpitrain.comm.fold import left_fold
from mpitrain.comm.link import Link
from mpitrain.comm.node import Node
from mpitrain.comm.progress import Progress
from mpitrain.comm.shared import Order, SharedChannel
from mpitrain.errors import MeshError
from mpitrain.schedules.steps import Algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

AXES = ("pp", "dp", "tp")


class Mesh:
    """Pipeline (pp) outermost, data (dp), tensor (tp) innermost: tp neighbours have neighbouring ranks, hence share a node.

        pp=2 x dp=2 x tp=2      dp  tp 0  1          `mesh["dp"]` on rank 1 is the communicator of ranks 1 and 3,
                        pp=0    0      0  1          `mesh["dp", "tp"]` that of ranks 0 to 3.
                                1      2  3
                        pp=1    0      4  5
                                1      6  7

    Takes any communicator, so a job that shrank can build it again. dp=0 stands for what pp and tp leave. All communicators are
    made here, and channels at start-up, in one order on every rank; `close` frees them. MeshError when the ranks do not fit.
    """

    axes = AXES

    def __init__(self, comm: MPI.Intracomm, *, pp: int = 1, dp: int = 0, tp: int = 1):
        from mpi4py import MPI
        pp, dp, tp = fit(comm.size, pp, dp, tp)
        self.progress = Progress()                            # of all channels: whoever waits moves them all
        self._lengths = dict(zip(AXES, (pp, dp, tp)))
        self._grid = comm.Create_cart([pp, dp, tp], periods=[False] * 3, reorder=False)
        self._grid.Set_errhandler(MPI.ERRORS_RETURN)
        self._coordinates: dict[str, int] = dict(zip(AXES, self._grid.Get_coords(self._grid.rank)))
        self._channels: list[Channel | SharedChannel | Link] = []
        self._nodes: list[Node] = []
        self._subsets: dict[tuple[str, ...], MPI.Cartcomm] = {}
        for count in (1, 2, 3):
            for names in combinations(AXES, count):
                self._subsets[names] = self._grid.Sub([axis in names for axis in AXES])
                self._subsets[names].Set_errhandler(MPI.ERRORS_RETURN)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={self._lengths[axis]}" for axis in AXES)

    @property
    def rank(self) -> int:
        return int(self._grid.rank)

    def __getitem__(self, axes: str | Sequence[str]) -> MPI.Cartcomm:
        """The communicator of the ranks that differ from this one along `axes` only; its ranks go along them in mesh order."""
        return self._subsets[self._names(axes)]

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._coordinates[axis]

    def size(self, axis: str) -> int:
        """How many places an axis has."""
        return self._lengths[axis]

    def channel(self, axes: str | Sequence[str], purpose: str, *, algorithm: str | Algorithm = "auto",
                wire: str | None = None) -> Channel:
        """A private duplicate of `mesh[axes]` for one purpose. Collective: every rank makes its channels in the same order."""
        names = self._names(axes)
        channel = Channel(self._subsets[names].Dup(), f"{'+'.join(names)}:{purpose}", algorithm=algorithm,
                          progress=self.progress, wire=wire)
        self._channels.append(channel)
        return channel

    def link(self, axes: str | Sequence[str], purpose: str) -> Link:
        """The same for messages between two ranks."""
        names = self._names(axes)
        link = Link(self._subsets[names].Dup(), f"{'+'.join(names)}:{purpose}", self.progress)
        self._channels.append(link)
        return link

    def share_memory(self, channel: Channel, *, order: Order = left_fold) -> SharedChannel:
        """`channel`, one of this mesh's, with memory shared between its ranks on a node. Collective over the channel.

        Its `notes` say where that could not be had. No array of its memory may be used after `close`.
        """
        comm: Any = channel.comm                              # a duplicate of a Cartesian one
        node = Node(comm, self.progress)
        shared = SharedChannel(channel, node, order=order)
        self._channels[self._channels.index(channel)] = shared
        self._nodes.append(node)
        return shared

    def close(self) -> None:
        """Free every channel, shared memory and communicator; collective."""
        self.progress.close()
        for channel in reversed(self._channels):
            channel.close()
        for node in reversed(self._nodes):
            node.close()
        self._nodes.clear()
        for comm in (*self._subsets.values(), self._grid):
            comm.Free()
        self._channels.clear()
        self._subsets.clear()

    @staticmethod
    def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
        asked = (axes,) if isinstance(axes, str) else tuple(axes)
        assert asked and set(asked) <= set(AXES), f"axes of the mesh are {AXES}, not {asked}"
        return tuple(axis for axis in AXES if axis in asked)


def fit(n: int, pp: int, dp: int, tp: int) -> tuple[int, int, int]:
    """(pp, dp, tp) with dp=0 filled in, for `n` ranks; MeshError when they do not fit. Needs no MPI."""
    for name, value, least in (("pp", pp, 1), ("dp", dp, 0), ("tp", tp, 1)):
        if value < least:
            zero = " (0: what pp and tp leave)" if name == "dp" else ""
            raise MeshError(f"mesh.{name}={value} must be at least {least}{zero}")
    if dp == 0:
        if n % (pp * tp):
            more = n - n % (pp * tp) + pp * tp
            raise MeshError(f"mesh pp={pp} x dp=0 x tp={tp} needs a multiple of {pp * tp} ranks, but mpirun started {n}; "
                            f"run with -n {more}, or change mesh.pp or mesh.tp")
        dp = n // (pp * tp)
    if pp * dp * tp != n:
        other = f"set mesh.dp={n // (pp * tp)} or " if n % (pp * tp) == 0 else ""
        raise MeshError(f"mesh pp={pp} x dp={dp} x tp={tp} needs {pp * dp * tp} ranks, but mpirun started {n}; "
                        f"{other}run with -n {pp * dp * tp}")
    return pp, dp, tp
