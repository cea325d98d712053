"""How the gradients of a run travel: through memory that ranks of a node share, or by messages; with what update after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.algorithms import hosts_of
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.nn import FlatLayout, Module
from mpitrain.optim import Optimizer
from mpitrain.parallel.gradients.norm import GradientNorm, Parts
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.statistics import Statistics
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.parallel.policies.node_memory import (
    NodeCopy,
    block_of_the_node,
    nodes_of,
    nodes_text,
    refuse_copies,
    refuse_unlike_nodes,
    shared_by_all,
)
from mpitrain.parallel.policies.node_shared import NodeExchange, NodeShared, Own, norm_of_all
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.parallel.policies.sharded import ShardedUpdate, Sharding, SliceSums
from mpitrain.parallel.policies.sharded_reducer import ShardedReducer
from mpitrain.placement.tree import RankTree
from mpitrain.schedules.collectives import ON_NODES
from mpitrain.schedules.grid import COPIES, REPLICAS

AUTO = "auto"


class Exchange:
    """The choice for one run, the same on all ranks. Ask it in this order: memory, reducer, own, norm, update.

    With `algorithm` "auto", gradients on the CPU go through shared memory where a node has room; a named algorithm goes by
    messages. `node_shared` keeps one copy of parameters and optimizer state on each node, `sharding` cuts states over ranks
    (as an attribute None, where one copy per node has done that). `notes` says what could not be had, and `choices` what was
    taken, as far as bits depend on it; both from `reducer` on.
    """

    def __init__(self, mesh: Mesh, *, algorithm: Any = AUTO, wire: str = "float32", node_shared: bool = False,
                 on_host: bool = True, sharding: Sharding | None = None):
        channel = mesh.channel(REPLICAS, "gradients", algorithm=algorithm, wire=None if wire == "float32" else wire)
        self.of_experts = None if mesh.size("ep") == 1 else mesh.channel(
            COPIES, "gradients of experts", algorithm=algorithm, wire=None if wire == "float32" else wire)
        self.mesh, self.progress, self.wire, self._notes = mesh, mesh.progress, wire, list[str]()
        self.choices: dict[str, Any] = {}
        self.sharding = sharding
        self.copies: SharedChannel | None = None              # the channel of the ranks that keep one copy on each node
        self.channel: AnyChannel = channel
        shared: SharedChannel | None = None
        by_messages = not node_shared and sharding is not None and sharding.cuts_gradients     # a bucket's memory is used again
        if algorithm == AUTO and on_host and channel.size > 1 and not by_messages:
            shared = self.channel = mesh.share_memory(channel)
        if node_shared and shared is not None:
            self._share(shared)

    def _share(self, shared: SharedChannel) -> None:
        """One copy on each node, as far as there is anything to have one of."""
        if shared.size < self.mesh[self.mesh.axes].size:
            refuse_unlike_nodes(self.mesh, shared)
        kind = self.sharding.kind if self.sharding is not None else "none"
        if not shared.shared:
            refuse_copies(shared)
            self._notes.append("comm.node_shared: every rank keeps a copy of its own")
        elif kind == "parameters" and shared.size > shared.node.size:
            self._notes.append(f'comm.node_shared: with comm.sharding = "{kind}" on several nodes a rank keeps slices, of which '
                               "there are no copies, and puts blocks together for itself")
        else:
            self.copies = shared
            if kind == "optimizer" and shared.size == shared.node.size:
                self.sharding = None                          # the ranks of the node are all that share its one copy
            elif self.sharding is not None:
                self.sharding.copy = NodeCopy(shared)
        if self.copies is None and self.sharding is not None and self.sharding.cuts_gradients:
            self.channel = shared.messages

    @property
    def notes(self) -> list[str]:
        return [*self.channel.notes, *self._notes]

    @property
    def allocate(self) -> Callable[[int], Any] | None:
        """Memory for parameters and optimizer state: the node's own with `node_shared`, else None, the device's."""
        return None if self.copies is None else self._of_the_node

    def reducer(self, storage: FlatLayout, optimizer: Optimizer, *, bucket_bytes: int, tree: RankTree | None,
                chunks: Sequence[int] | None = None, cuts: Sequence[int] | None = None, rounds: int = 1) -> GradientReducer:
        """The reducer over this exchange, where the rank that has most has `rounds` micro-batches.

        `cuts` are those of `sharded.where_to_cut`, for parts of parameters that are alike on all stages. StorageError where one
        copy per node leaves no room for gradients to share.
        """
        # A tree's sums go by messages and are whole on every rank: they need no memory that ranks share.
        if self.copies is not None and self.sharding is None:
            exchange = NodeExchange(self.copies, optimizer)
            reducer = GradientReducer(storage, exchange, bucket_bytes=bucket_bytes, progress=self.progress.progress, tree=tree,
                                      allocate=None if tree else exchange.allocate, chunks=chunks, cuts=cuts)
        elif self.sharding is not None and self.sharding.cuts_gradients:
            assert tree is None
            reducer = ShardedReducer(self.sharding.shards, self.channel, bucket_bytes=bucket_bytes,
                                     progress=self.progress.progress, rounds=rounds, chunks=chunks or [len(storage.segments)])
        else:
            over = self.channel if self.sharding is None else SliceSums(self.channel, self.sharding.shards, self.sharding.copy)
            reducer = GradientReducer(storage, over, bucket_bytes=bucket_bytes, progress=self.progress.progress, tree=tree,
                                      allocate=None if tree else self._arenas(storage), chunks=chunks,
                                      cuts=self.sharding.shards.cuts if self.sharding else None,
                                      apart=[self.of_experts if "ep" in s.parameter.placement else None
                                             for s in storage.segments])
        reducer.reserve()                                     # now, so that `notes` says it where that memory is too small
        if self.channel.size > 1:
            self.choices = {"exchange": self._choice(storage.dtype.name, tree)}
            if self.wire not in ("float32", self.choices["exchange"]["wire"]):
                self._notes.append(f'comm.wire_dtype = "{self.wire}" has no effect: ' + (
                    "it is for gradients of float32" if storage.dtype.name != "float32" else
                    "gradients go through shared memory, not by messages"))
        return reducer

    def own(self, reducer: GradientReducer, kept: Parts) -> Parts:
        """What this rank updates of what the optimizer is made for, `kept`."""
        return reducer.channel.own(reducer.buckets) if isinstance(reducer.channel, NodeExchange) else kept

    def norm(self, own: Parts, control: Channel, parts: Channel | None) -> GradientNorm:
        """The norm of a gradient of which this rank has `own`. `parts` connects the ranks that hold one model together, None
        where each holds all of it. It communicates."""
        if isinstance(own, Own) and self.copies is not None:
            own = own.once(self.copies)
        if self.copies is not None and parts is None:
            return norm_of_all(self.copies, own)
        return GradientNorm(own, self.mesh, control if self.copies is not None or self.sharding is not None else parts)

    def update(self, model: Module, optimizer: Optimizer, reducer: GradientReducer, control: Channel,
               rate: Callable[[int], float], *, clip_norm: float, statistics: Statistics, norm: GradientNorm | None = None,
               twins: Twins | None = None) -> Replicated:
        """The update that fits the reducer. `norm` is that of all parts of the model; by default a rank has the whole model, or
        its node has."""
        if isinstance(reducer.channel, NodeExchange):
            return NodeShared(model, optimizer, reducer, control, rate, reducer.channel, clip_norm=clip_norm,
                              statistics=statistics, norm=norm, twins=twins)
        if self.sharding is not None:
            assert norm is not None, "ranks have slices: the norm is over all of them"
            return ShardedUpdate(model, optimizer, reducer, control, rate, self.sharding, clip_norm=clip_norm,
                                 statistics=statistics, norm=norm, twins=twins)
        return Replicated(model, optimizer, reducer, control, rate, clip_norm=clip_norm, statistics=statistics, norm=norm,
                          twins=twins)

    def _choice(self, dtype: str, tree: RankTree | None) -> dict[str, Any]:
        """Two runs with equal choices add the ranks' gradients in the same order, and round them alike."""
        channel, algorithm = self.channel, self.channel.algorithm
        way = "messages" if tree else f"messages, {algorithm if isinstance(algorithm, str) else 'an algorithm of your own'}"
        if isinstance(algorithm, str) and algorithm in ON_NODES and channel.node is None:
            way += f" of ranks {nodes_text(hosts_of(channel.messages.comm))}"
        if tree:
            way += ", one tree over all micro-batches"
        elif self.sharding is not None and self.copies is None and (self.sharding.cuts_gradients or not channel.shares_all):
            way = "messages to the owners of slices" + (", each micro-batch" if self.sharding.cuts_gradients else "")
        elif channel.shared:
            nodes = nodes_text(nodes_of(channel))
            if not channel.notes:
                way = f"shared memory of ranks {nodes}"
                if channel.cross is not None and self.copies is not None:
                    way += ", one copy per node"              # whose slices are cut otherwise
                if self.sharding is not None and self.sharding.cuts_gradients:
                    way += ", each micro-batch"
            elif channel.cross is None:                       # what is copied needs little room
                way += f", small buckets through shared memory of ranks {nodes}"
        return {"ranks": channel.size, "way": way, "wire": self.wire if self._is_packed(dtype) else dtype}

    def _is_packed(self, dtype: str) -> bool:
        """Whether gradients travel as 16 bits: those of float32 do, in messages."""
        return dtype == "float32" and self.wire != "float32" and not self.channel.shares_all

    def _arenas(self, storage: FlatLayout) -> Callable[[], Array] | None:
        """Memory for the reducer's arenas, one a call: the first is what is summed over ranks, so it is shared."""
        if not self.channel.shared:
            return None
        made: list[Array] = []
        first = self.channel.allocate if self.copies is None else partial(shared_by_all, self.copies, name="gradients")

        def arena() -> Array:
            made.append(storage.new_flat(None if made else first))
            return made[-1]
        return arena

    def _of_the_node(self, nbytes: int) -> Any:
        assert self.copies is not None
        return block_of_the_node(self.copies, nbytes, "parameters and optimizer state")


def change(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """One line where gradients are summed in another way than before on as many ranks, so that bits change; else nothing."""
    if not was or not now or was == now or was.get("ranks") != now["ranks"]:
        return ""
    if now["ranks"] == 2 and was.get("wire") == now["wire"]:
        return ""                                             # the sum of two has no order
    before, after = (f"{choice.get('way')} ({choice.get('wire')})" for choice in (was, now))
    return (f"gradients were summed by {before}, and are by {after}: from here on the bits are not those of the run that was "
            "interrupted")
