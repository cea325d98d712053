"""States that sites have of their own: ``workers/<k>/<kind>/<leaf>`` of a checkpoint, worker k being a site of the mesh.

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


class OfSite(Kept):
    """This site's arrays of a kind that each site has of its own.

    `first` is 1 where the checkpoint's `name` itself is that of site 0; else each site has its arrays under ``workers``.
    `there` says whether a checkpoint has them now; `sites` is the number of sites of the checkpoint that is read. What is
    `shared` is owed by all sites together: another number of them gets the mean of the old ones.
    """

    steady = False

    def __init__(self, name: str, placed: Callable[[], Iterable[Placed]], dtype: Any, mesh: Mesh, *, first: int = 0,
                 there: Callable[[], bool] = lambda: True, shared: bool = False, **options: Any):
        self.kind, self.mesh, self.first, self.there, self.shared = name, mesh, first, there, shared
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
        site, n = self.mesh.coordinate("site"), self.mesh.n_sites
        from_ = range(self.sites) if self.shared and self.sites != n else (site % self.sites,)
        for one in self.placed():
            for part, start in one.boxes(one.array):
                found = sum(checkpoint.read(f"{self._prefix(k)}/{one.leaf.key}", start, part.shape) for k in from_)
                part[...] = array_module(one.array).asarray(found if len(from_) == 1 else found / len(from_))


class OwnedBySites(Kept):
    """Arrays of sums over sites, of which one site keeps each element: ``<prefix>/<leaf>``, of which each writes its own."""

    steady = False

    def __init__(self, prefix: str, placed: Callable[[], Iterable[Placed]], dtype: Any, mesh: Mesh, **options: Any):
        super().__init__(prefix, placed, dtype, **options)
        self.mesh, self.sites = mesh, mesh.n_sites

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        for one in self.placed():
            if is_first(one.leaf, self.mesh, without=("site", "pp")):      # Compressed fragments are of whole parameters.
                yield from self.boxes(one)

    def read(self, checkpoint: Checkpoint) -> None:
        super().read(checkpoint)
        if self.sites != self.mesh.n_sites:                   # What is left is of a sum over more sites, or fewer.
            for one in self.placed():
                array = one.array
                array *= array.dtype.type(self.mesh.n_sites / self.sites)


def sites_of(found: Checkpoint) -> int:
    """The number of sites of the run that wrote a checkpoint."""
    mesh = found.meta.get("mesh")
    return int(mesh.get("site", 1)) if isinstance(mesh, dict) else 1


def is_apart(found: Checkpoint) -> bool:
    """Whether the sites of the run that wrote a checkpoint had parameters of their own."""
    return any(name.startswith("workers/0/parameters/") for name in found.arrays)


def refuse_apart(found: Checkpoint, sites: int = 1) -> None:
    """CheckpointError for a checkpoint of sites that had parameters of their own, in a run with another number of them."""
    if is_apart(found) and sites_of(found) != sites:
        were = sites_of(found)
        raise CheckpointError(f"after step {found.step} the {were} sites of this run had parameters of their own, and mesh.site "
                              f"= {sites} now; set mesh.site = {were}, or go on from the end of a round", file=found.folder)
