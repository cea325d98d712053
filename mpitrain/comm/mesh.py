"""The ranks as a named grid, by MPI's own Cartesian communicators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared.channel import Order, SharedChannel
from mpitrain.comm.shared.fold import left_fold
from mpitrain.comm.shared.node import Node
from mpitrain.errors import MeshError
from mpitrain.schedules.steps import Algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

AXES = ("pp", "dp", "ep", "cp", "tp")
ALWAYS_NAMED = ("pp", "dp", "tp")          # also where they have one place
DATA = ("dp", "ep")                        # ranks along these have different samples
REPLICAS = ("dp", "ep", "cp")              # ranks along these have copies of one part of the model (but for experts, along ep)
COPIES = ("dp", "cp")                      # ranks along these have copies of all of it, experts too


class Mesh:
    """Pipeline (pp) outermost, then data (dp), experts (ep), context (cp), and tensor (tp) innermost: tp neighbours have
    neighbouring ranks, hence share a node.

        pp=2 x dp=2 x tp=2      dp  tp 0  1          `mesh["dp"]` on rank 1 is the communicator of ranks 1 and 3,
                        pp=0    0      0  1          `mesh["dp", "tp"]` that of ranks 0 to 3.
                                1      2  3
                        pp=1    0      4  5
                                1      6  7

    Takes any communicator, so a job that shrank can build it again. dp=0 stands for what the others leave. All communicators are
    made here, and channels at start-up, in one order on every rank; `close` frees them. MeshError when the ranks do not fit.
    """

    axes = AXES

    def __init__(self, comm: MPI.Intracomm, **lengths: int):
        from mpi4py import MPI
        self._lengths = fit(comm.size, **lengths)
        self.progress = Progress()                            # of all channels: whoever waits moves them all
        self._grid = comm.Create_cart([*self._lengths.values()], periods=[False] * len(AXES), reorder=False)
        self._grid.Set_errhandler(MPI.ERRORS_RETURN)
        self._coordinates: dict[str, int] = dict(zip(AXES, self._grid.Get_coords(self._grid.rank)))
        self._channels: list[Channel | SharedChannel | Link] = []
        self._nodes: list[Node] = []
        self._subsets: dict[tuple[str, ...], MPI.Cartcomm] = {}
        long = [axis for axis in AXES if self._lengths[axis] > 1]      # the others add no rank to a subset
        for count in range(len(long) + 1):
            for names in combinations(long, count):
                self._subsets[names] = self._grid.Sub([axis in names for axis in AXES])
                self._subsets[names].Set_errhandler(MPI.ERRORS_RETURN)

    def __str__(self) -> str:
        return describe(self._lengths)

    @property
    def rank(self) -> int:
        return int(self._grid.rank)

    @property
    def cuts_model(self) -> bool:
        """Whether a rank has a part of the model only."""
        return any(self._lengths[axis] > 1 for axis in ("pp", "ep", "tp"))

    @property
    def n_places(self) -> int:
        """How many ranks, or groups of ranks that hold one model together, have samples of their own."""
        return math.prod(self._lengths[axis] for axis in DATA)

    @property
    def place(self) -> int:
        """This rank's number among those."""
        number = 0
        for axis in DATA:
            number = number * self._lengths[axis] + self._coordinates[axis]
        return number

    def __getitem__(self, axes: str | Sequence[str]) -> MPI.Cartcomm:
        """The communicator of the ranks that differ from this one along `axes` only; its ranks go along them in mesh order."""
        return self._subsets[self._long(self._names(axes))]

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
        channel = Channel(self._subsets[self._long(names)].Dup(), self._label(names, purpose), algorithm=algorithm,
                          progress=self.progress, wire=wire)
        self._channels.append(channel)
        return channel

    def link(self, axes: str | Sequence[str], purpose: str) -> Link:
        """The same for messages between two ranks."""
        names = self._names(axes)
        link = Link(self._subsets[self._long(names)].Dup(), self._label(names, purpose), self.progress)
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

    def _label(self, names: Sequence[str], purpose: str) -> str:
        return f"{'+'.join(axis for axis in names if axis in ALWAYS_NAMED or self._lengths[axis] > 1) or names[0]}:{purpose}"

    def _long(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if self._lengths[axis] > 1)

    @staticmethod
    def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
        asked = (axes,) if isinstance(axes, str) else tuple(axes)
        assert asked and set(asked) <= set(AXES), f"axes of the mesh are {AXES}, not {asked}"
        return tuple(axis for axis in AXES if axis in asked)


def fit(n: int, **lengths: int) -> dict[str, int]:
    """The length of every axis, 1 where nothing is said, with dp=0 (the default) filled in, for `n` ranks; MeshError when they
    do not fit. Needs no MPI."""
    assert set(lengths) <= set(AXES), f"axes of the mesh are {AXES}, not {(*lengths,)}"
    found = {axis: lengths.get(axis, 0 if axis == "dp" else 1) for axis in AXES}
    for axis, value in found.items():
        if value < (axis != "dp"):
            zero = " (0: what the others leave)" if axis == "dp" else ""
            raise MeshError(f"mesh.{axis}={value} must be at least {int(axis != 'dp')}{zero}")
    others = math.prod(value for axis, value in found.items() if axis != "dp")
    if found["dp"] == 0:
        if n % others:
            cut = [f"mesh.{axis}" for axis in AXES if axis != "dp" and (axis in ALWAYS_NAMED or found[axis] > 1)]
            raise MeshError(f"mesh {describe(found)} needs a multiple of {others} ranks, but mpirun started {n}; "
                            f"run with -n {n - n % others + others}, or change {' or '.join(cut)}")
        found["dp"] = n // others
    if found["dp"] * others != n:
        other = f"set mesh.dp={n // others} or " if n % others == 0 else ""
        raise MeshError(f"mesh {describe(found)} needs {found['dp'] * others} ranks, but mpirun started {n}; "
                        f"{other}run with -n {found['dp'] * others}")
    return found


def describe(lengths: Mapping[str, int]) -> str:
    """``pp=2 x dp=2 x tp=1``: axes that are seldom used only where they have more than one place."""
    return " x ".join(f"{axis}={n}" for axis, n in lengths.items() if axis in ALWAYS_NAMED or n > 1)
