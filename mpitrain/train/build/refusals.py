"""Options of a run that do not go together, refused by name; `o` is an `assembly.Options`."""

from __future__ import annotations

from typing import Any

from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError, MeshError


def refuse_cut(o: Any, mesh: Mesh) -> None:
    """Raises ConfigError for what cannot be had where the model is cut into stages."""
    if o.tune_buckets and mesh.size("pp") > 1:
        raise ConfigError(f'comm.bucket_mb = "auto" finds one list of buckets for all ranks, and stages have parameters of their '
                          f"own, found the mesh {mesh}; set comm.bucket_mb to a number, or mesh.pp = 1")


def refuse_uneven_experts(mesh: Mesh, n_micro: int, fewest: int) -> None:
    """Raises where ranks that share experts would run them unequally often; `fewest` rows has the smallest global batch."""
    if mesh.size("ep") == 1:
        return
    n, what = mesh.n_places, f"mesh.ep = {mesh.size('ep')} sends rows to the experts of other ranks in each micro-batch"
    if n_micro % n:
        fits = max(n, n_micro - n_micro % n)
        raise MeshError(f"{what}, so all ranks need as many: found {n_micro} micro-batches for {n} data-parallel ranks; set "
                        f"train.micro_batches to {fits} or {n_micro + -n_micro % n}")
    if fewest < n_micro:
        raise ConfigError(f"{what}, so each needs a row, and an epoch ends with a batch of {fewest} rows for {n_micro} "
                          "micro-batches; set data.drop_last = true, or fewer train.micro_batches")


def refuse_with_experts(o: Any, mesh: Mesh) -> None:
    """ConfigError for what is not there where ranks share experts."""
    n = mesh.size("ep")
    if n > 1 and o.sharding != "none":
        raise ConfigError(f'comm.sharding = "{o.sharding}" cuts states over all data-parallel ranks, and mesh.ep = {n} gives '
                          'them different experts; set comm.sharding = "none", or mesh.ep = 1')
    if n > 1 and o.tune_buckets:
        raise ConfigError('comm.bucket_mb = "auto" cuts all gradients anew, and those of experts are apart from the rest, found '
                          f"mesh.ep = {n}; set comm.bucket_mb to a number, or mesh.ep = 1")
    if n > 1 and o.node_shared:
        raise ConfigError(f"comm.node_shared = true sums all gradients over the same ranks, and with mesh.ep = {n} those of "
                          "experts go over others; set comm.node_shared = false, or mesh.ep = 1")


def refuse_one_copy(o: Any) -> None:
    """Raises ConfigError where one copy per node is asked for together with what starts sums that are no step's.

    Parameters are updated inside the sum of their gradients: a probe of the exchange would train, and a thread of its own would
    write parameters while the program reads them.
    """
    for wrong, found, instead in ((o.progress != "poll", f'comm.progress = "{o.progress}"', 'comm.progress = "poll"'),
                                  (o.tune_buckets, 'comm.bucket_mb = "auto"', "a number for comm.bucket_mb")):
        if o.node_shared and wrong:
            raise ConfigError(f"comm.node_shared = true updates parameters while gradients are summed, found {found}; set "
                              f"{instead}, or comm.node_shared = false")
