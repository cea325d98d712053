"""States that workers have of their own: ``workers/<k>/<kind>/<leaf>`` of a checkpoint, worker k being a site of the mesh.

A checkpoint of several sites is read by as many, or, where their parameters were equal, by any number: worker k then takes the
states of worker k modulo the number of old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpitrain.backend import array_module
from mpitrain.checkpoint.kinds import Expected, Kept, Placed, Shapes
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError
from mpitrain.parallel.gradients.norm import is_first
from mpitrain.schedules.grid import COPIES


class Sometimes(Kept):
    """A kind whose arrays are there after some steps only, as `placed` and `among` say each time."""

    steady = False


class OfWorkers(Kept):
    """This site's arrays of a kind that each site has of its own.

    `first` is 1 where the checkpoint's `name` itself is that of site 0; else each site has its arrays under ``workers``.
    `there` says whether a checkpoint has them now; `sites` is the number of sites of the checkpoint that is read.
    """

    steady = False

    def __init__(self, name: str, placed: Callable[[], Iterable[Placed]], dtype: Any, mesh: Mesh, *, first: int = 0,
                 there: Callable[[], bool] = lambda: True, **options: Any):
        self.kind, self.mesh, self.first, self.there = name, mesh, first, there
        self.sites = mesh.n_sites
        super().__init__(self._prefix(mesh.coordinate("site")), placed, dtype, **options)

    def _prefix(self, site: int) -> str:
        return self.kind if site < self.first else f"workers/{site}/{self.kind}"

    def expected(self, shapes: Shapes) -> Expected:
        start = f"{self.prefix}/"
        own = {name.removeprefix(start): about for name, about in super().expected(shapes).items()} if self.there() else {}
        return {f"{self._prefix(site)}/{name}": about for site in range(self.first, self.sites) for name, about in own.items()}

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        if self.mesh.coordinate("site") < self.first or not self.there():
            return
        for one in self.placed():
            without = ("site", "pp") if one.first is None else ("site", "pp", *COPIES)
            if is_first(one.leaf, self.mesh, without=without):
                yield from self.boxes(one)

    def read(self, checkpoint: Checkpoint) -> None:
        if not self.there():
            return
        prefix = self._prefix(self.mesh.coordinate("site") % self.sites)
        for one in self.placed():
            for part, start in one.boxes(one.array):
                part[...] = array_module(one.array).asarray(checkpoint.read(f"{prefix}/{one.leaf.key}", start, part.shape))


def sites_of(found: Checkpoint) -> int:
    """The number of sites of the run that wrote a checkpoint."""
    mesh = found.meta.get("mesh")
    return int(mesh.get("site", 1)) if isinstance(mesh, dict) else 1


def refuse_apart(found: Checkpoint) -> None:
    """CheckpointError for a checkpoint of sites that had parameters of their own, in a run with one site."""
    if any(name.startswith("workers/0/parameters/") for name in found.arrays):
        raise CheckpointError(f"after step {found.step} the {sites_of(found)} sites of this run had parameters of their own, and there "
                              f"is one now; set mesh.site = {sites_of(found)}, or go on from the end of a round", file=found.folder)
