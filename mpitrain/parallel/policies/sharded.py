"""Optimizer state, gradients and parameters cut over data-parallel ranks (`shards`): every rank updates its slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.work import Collective, Work
from mpitrain.nn import FlatLayout
from mpitrain.optim import Segment
from mpitrain.parallel.gradients.bucket_sum import AllReduce, BucketSum, TreeSum
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.node_copy import NodeCopy
from mpitrain.parallel.policies.node_memory import norm_of_node
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.parallel.policies.sharded_reducer import ShardedReducer
from mpitrain.parallel.policies.unshard import Unsharding
from mpitrain.placement.buckets import Bucket
from mpitrain.placement.bytes import Bytes
from mpitrain.placement.shard_cuts import needs_whole_parameters
from mpitrain.placement.shards import Shards, Unit
from mpitrain.schedules.grid import REPLICAS


class Sharded(Policy):
    """Every rank updates its slices, and gives them to the others where those keep whole parameters.

    `copy` holds the whole parameters once on each node, for its ranks. A reducer's buckets are the units of `shards`.
    """

    shards: Shards

    cuts = "optimizer"

    def __init__(self, setup: Setup, channel: AnyChannel, copy: NodeCopy | None = None):
        super().__init__(setup, channel)
        self.copy, self.per_node = copy, copy is not None
        self.ranks = self.mesh.channel(REPLICAS, "parameters")

    def initialise(self) -> None:
        self.whole_of(None if self.copy is None else self.copy.allocate)
        self.storage = self.shards = self.cut(self.layout)
        self.shards.values = self.shards.strips(self.values)
        self.pack()
        if self.packed is not None:
            self.masters, own = True, self.shards.values
            self.shards.values = self.shards.new_flat()
            for unit in self.shards.units:
                if unit.parts:
                    self.shards.values[unit.shard] = own[unit.shard]
            self.settle()                                     # All of a node have read their slices of the initial values.
            self.packed.round(self.values)
            self.settle()

    def pack(self) -> None:
        """Makes the gathers of `comm.compress_parameters`, or says why there are none. It communicates."""
        config = self.setup.config
        if not config.comm.compress_parameters or self.ranks.size == 1:
            return
        from mpitrain.parallel.policies.packed import PackedParameters, why_not
        if why := why_not(config, self.channel, self.copy):
            self.said.append(why)
            return
        cross = None if self.copy is None else self.copy.shared.cross
        self.packed = PackedParameters(config, self.ranks if cross is None else cross, self.shards, self.context.control,
                                       self.copy)
        self.said.append(self.packed.note())

    def cut(self, layout: FlatLayout) -> Shards:
        """The slices of the layout that this rank keeps."""
        make, copy = self.setup.optimizer, self.copy
        return self.context.placement.shards(layout, whole=make is not None and needs_whole_parameters(make),
                                          blocks=self.cuts_parameters, number=None if copy is None else copy.number)

    def norm_of(self, own: Sequence[Segment]) -> GradientNorm:
        if self.copy is not None and self.context.parts is None:
            return norm_of_node(self.copy.shared, own)
        return GradientNorm(own, self.mesh, self.context.own_site)

    def compressed_slices(self, feedback: bool, rounds: int = 1) -> Any:
        """The packed sums of `comm.compress` to the owners of slices; None where gradients travel as they are."""
        comm, config = self.setup.config.comm, self.setup.config
        if not comm.compress:
            return None
        from mpitrain.parallel.compress.choose import why_dense
        from mpitrain.parallel.compress.compressor import make_compressor
        from mpitrain.parallel.compress.slices import CompressedSlices
        if why := why_dense(config, self.channel):
            self.said.append(why)
            return None
        self.compressed = CompressedSlices(
            self.channel.messages, self.shards, make_compressor(comm.compress, config.folder), step=lambda: self.step,
            seed=config.run.seed, feedback=feedback, after=comm.compress_after, rounds=rounds)
        return self.compressed

    def opened(self, reducer: GradientReducer) -> GradientReducer:
        """The reducer, whose packed sums are ready for steps, if it has some. It communicates."""
        if self.compressed is not None:
            from mpitrain.parallel.compress.choose import open_sum
            self.said += open_sum(self.compressed, reducer.buckets, self.context.control)
        return reducer

    def unlike(self, step: int) -> Sequence[str]:
        return () if self.compressed is None else ("workers", "compress")

    def update(self, gradients: Any, lr: float, scale: float) -> None:
        self.forget()
        works = []
        for unit in self.shards.units:
            self.change(gradients, lr, scale, unit.parts)
            if any(s.parameter.requires_grad for s in unit.segments):
                works.append(self.start_gather(unit))
        for segment in self.layout.segments:                  # The slices of other ranks change too.
            segment.parameter.mark_changed()
        for work in works:
            if work is not None:
                work.wait()
        self.refresh()

    def start_gather(self, unit: Unit) -> Work | None:
        """Begins to give all ranks the owners' new values of a bucket; None where each rank keeps its own alone."""
        if self.ranks.size == 1:
            return None
        if self.packed is not None:
            work: Work = self.packed.start(unit, self.values)
            return work
        if self.copy is not None:
            return self.copy.start_gather(self.values, unit)
        return self.ranks.start_all_gather(self.values[unit.start:unit.stop], unit.owners_to_all, unit.name)

    def publish(self) -> None:
        self.gather()
        super().publish()

    def gather(self) -> None:
        """Gives all ranks the owners' values, where they keep whole parameters. It communicates."""
        self.forget()
        for work in [self.start_gather(unit) for unit in self.shards.units]:
            if work is not None:
                work.wait()

    def forget(self) -> None:
        """Drops what was made of the old parameters."""

    def values_written(self) -> None:
        if self.masters:                                      # A checkpoint has the owners' values alone.
            self.gather()
            self.settle()
        else:
            self.forget()

    def settle(self) -> None:
        """Waits until no rank of a node writes memory that another one reads."""
        if self.copy is not None:
            self.copy.barrier.run()

    def measured(self) -> Bytes:
        found, sharing = super().measured(), 1 if self.copy is None else self.copy.shared.node.size
        masters = self.shards.values.nbytes if self.masters else 0
        return found._replace(parameters=-(-found.parameters // sharing) + masters)

    def way(self) -> str:
        found = super().way()
        if self.copy is None and not self.tree and (self.cuts_gradients or not self.channel.shares_all):
            found = "messages to the owners of slices"
        elif self.copy is not None and self.channel.cross is not None and not self.tree:
            found += ", one copy per node"                    # Several nodes cut slices in another way.
        return found + (", each micro-batch" if self.cuts_gradients else "")


class ShardedOptimizer(Sharded):
    """Whole parameters and gradients on every rank, and slices of the optimizer's state."""

    def make_reducer(self) -> GradientReducer:
        coded = self.compressed_slices(self.setup.config.comm.compress_feedback)
        bucket_sum: BucketSum = coded or (TreeSum(self.channel, self.tree) if self.tree else
                                          SliceSum(self.channel, self.shards, self.copy))
        allocate = None if self.tree or coded or not self.channel.shared else \
            self.channel.allocate if self.copy is None else self.copy.allocate_sums
        return self.opened(self.reducer_over(bucket_sum, cuts=self.shards.cuts, allocate=allocate))

    def own_gradients(self, gradients: Array) -> Any:
        return self.shards.strips(gradients)


class ShardedGradients(Sharded):
    """Slices of the gradients too: buckets leave after each micro-batch."""

    cuts = "gradients"
    cuts_gradients = True

    def make_reducer(self) -> GradientReducer:
        copy = self.copy
        # Where ranks sum in one memory, another may still read a bucket when this rank's slice is there: all get the whole sum.
        rounds = self.context.placement.rounds
        bucket_sum: BucketSum = self.compressed_slices(False, rounds) or (
            SliceSum(self.channel, self.shards) if copy is None else AllReduce(self.channel))
        return self.opened(ShardedReducer(
            self.shards, bucket_sum, bucket_bytes=self.bucket_bytes, progress=self.mesh.progress.progress,
            chunks=self.stage.sizes, rounds=rounds, allocate=None if copy is None else copy.allocate_sums))


class ShardedParameters(ShardedGradients):
    """Slices of everything: a rank puts the parameters of a block together for as long as it computes."""

    cuts = "parameters"
    cuts_parameters = True

    def initialise(self) -> None:
        run, train = self.setup.config.run, self.setup.config.train
        self.layout = self.stage.model.describe(run.seed, train.precision, self.setup.device)
        self.storage = self.shards = self.cut(self.layout)
        self.values = self.shards.values = self.shards.initialise(run.seed)
        self.pack()
        self.unsharding = Unsharding(self.stage.chunks, self.shards, self.ranks, self.mesh.progress.progress, self.packed)

    def start_gather(self, unit: Unit) -> Work | None:
        return None

    def forget(self) -> None:
        self.unsharding.reshard()


class SliceSum:
    """A `BucketSum` of which each rank keeps its slice alone.

    Ranks that all share memory sum there, in the order of the plain sum; others by messages. With a `copy` on each node, a node's
    sum is made in its memory, and only that travels.
    """

    tree = None

    def __init__(self, channel: AnyChannel, shards: Shards, copy: NodeCopy | None = None):
        self.channel, self.size, self.shards, self.copy = channel, channel.size, shards, copy

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        unit = self.shards.units[bucket.index]
        if self.copy is not None:
            return self.copy.shared.prepare_sum_of_slice(arrays[0], bucket.name, self.copy.piece(unit))
        return self.channel.prepare_slice(arrays[0], bucket.name, (unit.within.start, unit.within.stop), unit.sum_to_owners)
