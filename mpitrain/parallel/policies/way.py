"""How ranks add gradients up, in words, as far as bits depend on it."""

from __future__ import annotations

from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.algorithms import hosts_of, name_of
from mpitrain.schedules.collectives import ON_NODES


def way_of(channel: AnyChannel, tree: bool) -> str:
    """The words for a channel of gradients; with a `tree`, sums are along one over all micro-batches. It communicates."""
    from mpitrain.parallel.policies.node_memory import nodes_of, nodes_text  # what shares no memory needs none of it
    if tree:
        return "messages, one tree over all micro-batches"
    if channel.shared and not channel.notes:
        return f"shared memory of ranks {nodes_text(nodes_of(channel))}"
    way = f"messages, {name_of(channel.algorithm) if isinstance(channel.algorithm, str) else 'an algorithm of your own'}"
    if isinstance(channel.algorithm, str) and channel.algorithm in ON_NODES:
        way += f" of ranks {nodes_text(hosts_of(channel.messages.comm))}"
    if channel.shared and channel.cross is None:              # Copied arrays need little room.
        way += f", small buckets through shared memory of ranks {nodes_text(nodes_of(channel))}"
    return way
