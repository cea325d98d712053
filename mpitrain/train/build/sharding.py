"""`comm.sharding`: whether states are cut, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.comm.mesh import Mesh
from mpitrain.config.sections import CommConfig
from mpitrain.parallel.policies.sharded import Sharding
from mpitrain.schedules.grid import REPLICAS


def open_sharding(comm: CommConfig, mesh: Mesh) -> Sharding | None:
    """How `comm.sharding` cuts states; None where nothing is cut, or there is one rank to cut for."""
    return Sharding(comm.sharding, mesh) if comm.sharding != "none" and mesh.count(REPLICAS) > 1 else None


def memory_text(everyone: Sequence[Sequence[int]], kind: str, *, per_node: bool = False) -> str:
    """One line: what the rank that keeps most keeps of parameters, gradients and optimizer state; with one copy `per_node`, its
    share of that."""
    largest = max(everyone, key=sum)
    parts = ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in zip(("parameters", "gradients", "optimizer"), largest))
    return f'comm.sharding = "{kind}"{", one copy per node" if per_node else ""}: a rank keeps {parts}'
