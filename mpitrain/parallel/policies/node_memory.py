"""Memory that the ranks of a node share for one copy per node, and the errors where it cannot be had."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.face import AnyChannel
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.errors import ConfigError, StorageError
from mpitrain.optim import Segment
from mpitrain.parallel.gradients.norm import GradientNorm


def shared_by_all(shared: SharedChannel, nbytes: int, name: str) -> Any:
    """`nbytes` bytes of each rank in which ranks can sum. Collective; StorageError, on all ranks, where there is no room."""
    memory = shared.allocate(nbytes)
    if shared.notes:
        raise no_room(shared, name)
    return memory


def block_of_the_node(shared: SharedChannel, nbytes: int, name: str) -> Any:
    """`nbytes` bytes once on each node. Collective; StorageError, on all ranks, where one node has no room for them."""
    block = shared.node.block(nbytes, name)
    if any(shared.messages.gather_objects(block is None)):
        raise no_room(shared, name)
    return block


def norm_of_node(shared: SharedChannel, own: Sequence[Segment]) -> GradientNorm:
    """The norm of a gradient whose parts all lie on the ranks of `shared`, without messages inside a node. Collective."""
    return GradientNorm(own, channel=shared, allocate=lambda nbytes: shared_by_all(shared, nbytes, "the gradient norm"))


def refuse_copies(shared: SharedChannel) -> None:
    """Raises, on all ranks, where these ranks cannot share memory though one copy per node is wanted. Collective.

    With one rank on each node, one copy per node is a copy per rank, and nothing is refused.
    """
    found = shared.messages.gather_objects([shared.node.size, shared.node.obstacle])
    if any(obstacle for _, obstacle in found):
        raise no_room(shared, "gradients")
    if any(size > 1 for size, _ in found):
        raise ConfigError(f"comm.node_shared = true needs memory that the ranks of each node share: {shared.obstacle}; set "
                          "comm.node_shared = false")


def nodes_of(shared: AnyChannel) -> list[int]:
    """The first rank on the node of each rank. Collective."""
    assert shared.node is not None
    return shared.messages.gather_objects(shared.node.ranks[0])


def refuse_unlike_nodes(mesh: Mesh, shared: SharedChannel) -> None:
    """ConfigError, on all ranks, where the data-parallel ranks of two stages lie on nodes in different ways.

    Slices follow the numbers of ranks on their node, and stages exchange slices of tied parameters, which must be cut alike.
    """
    found = mesh.channel(mesh.axes, "nodes").gather_objects(nodes_of(shared))
    other = next((rank for rank, nodes in enumerate(found) if nodes != found[0]), None)
    if other is not None:
        raise ConfigError(f"comm.node_shared = true on the mesh {mesh} needs the data-parallel ranks of all parts of the model "
                          f"on nodes alike: rank 0 is with ranks on nodes {nodes_text(found[0])}, rank {other} with ranks on "
                          f"{nodes_text(found[other])}; start another number of ranks on each node, or set "
                          "comm.node_shared = false")


def nodes_text(nodes: Sequence[int]) -> str:
    """``0-1, 4 | 2-3`` for the nodes (any numbers) of ranks 0, 1, ...: here 0 0 1 1 0."""
    ranges: dict[int, list[list[int]]] = {}
    for rank, node in enumerate(nodes):
        mine = ranges.setdefault(node, [])
        if mine and mine[-1][1] == rank - 1:
            mine[-1][1] = rank
        else:
            mine.append([rank, rank])
    return " | ".join(", ".join(str(first) if first == last else f"{first}-{last}" for first, last in mine)
                      for mine in ranges.values())


def no_room(shared: SharedChannel, name: str) -> StorageError:
    """The error of memory that a node refused, the same on all ranks: with the reason of the first node that did. Collective."""
    found = shared.messages.gather_objects([shared.node.obstacle, socket.gethostname()])
    obstacle, host = next(((text, host) for text, host in found if text), ("there is none", "a node"))
    where = f" on {host}" if shared.node.size < shared.size else ""
    return StorageError(f"comm.node_shared = true: no shared memory for {name}{where}: {obstacle}; or set "
                        "comm.node_shared = false")
