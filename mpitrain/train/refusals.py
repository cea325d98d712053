"""Options of a run that do not go together, refused by name; `o` is an `assembly.Options`."""

from __future__ import annotations

from typing import Any

from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError


def refuse_cut(o: Any, mesh: Mesh) -> None:
    """Raises ConfigError for what cannot be had where the model is cut into stages."""
    if o.tune_buckets and mesh.size("pp") > 1:
        raise ConfigError(f'comm.bucket_mb = "auto" finds one list of buckets for all ranks, and stages have parameters of their '
                          f"own, found the mesh {mesh}; set comm.bucket_mb to a number, or mesh.pp = 1")


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
