"""One copy of parameters and optimizer state on each node; every rank updates its slices of them.

    rank 0's gradients   [ slice 0 | slice 1 ] ...             parameters, m, v      [ slice 0 | slice 1 ] ...   one copy
    rank 1's gradients   [ slice 0 | slice 1 ] ...                                        ^ 0       ^ 1
                              \\_ sum __/  ->  rank 0 sums slice 0 of each bucket and updates it, block by block in the cache

No sum is written back to the others, no parameter is gathered, and a rank does 1/n of the optimizer's work. Between nodes, the
same-numbered ranks sum their slices by messages.

The update of a slice follows its sum at once: when every rank of the node has a bucket's gradients, no backward reads its weights
any more. (Backwards run in the order of the micro-batches, and the half that gives gradients of parameters runs last.) A backward
that does read such a weight again, because forward read it by `detach`, raises an error: a bucket's weights count as changed from
the start of its sum. Updates wait where the norm is wanted first (clipping, logging), or tied parameters are to be added up.

On a mesh, the data-parallel ranks of each stage, and of each place along tp, have a copy of their part on each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.engine import Pass
from mpitrain.comm.work import Collective, Work
from mpitrain.kernels.optimizer import part_function
from mpitrain.optim import Optimizer, Segment
from mpitrain.parallel.gradients.bucket_sum import TreeSum
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.node_copy import NodeCopy, barrier
from mpitrain.parallel.policies.node_memory import (
    block_of_the_node,
    norm_of_node,
    refuse_copies,
    refuse_unlike_nodes,
    shared_by_all,
)
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.parallel.policies.sharded import ShardedGradients, ShardedOptimizer, ShardedParameters
from mpitrain.placement.buckets import Bucket
from mpitrain.placement.bytes import Bytes
from mpitrain.placement.slices import Part, cut_slices, parts_of

ADVICE = ("comm.node_shared = true updates a parameter as soon as its gradient is complete, while backward still runs: where it "
          "is read without a gradient (detach), read a copy, Tensor(weight.numpy().copy()), or set comm.node_shared = false")


class OwnSlice:
    """This rank's slice of one bucket: elements `within` it, the parts of parameters there, and their updates by C."""

    def __init__(self, bucket: Bucket, rank: int, n: int, *, whole: bool):
        own = cut_slices(bucket.segments, bucket.start, bucket.stop, n, whole=whole)[rank]
        self.within = own.start - bucket.start, own.stop - bucket.start
        self.parts = parts_of(bucket.segments, own)
        self.passes: Any = None
        self.trained: list[bool] = []                         # Whether each part was trained when `passes` were made.


class NodeShared(Policy):
    """Equal to `Replicated` to the bit where that sums in the same order. `BucketSum` of its own reducer."""

    per_node = True
    channel: SharedChannel

    def __init__(self, setup: Setup, channel: SharedChannel):
        super().__init__(setup, channel)
        self.size = channel.size
        self._slices: dict[int, OwnSlice] = {}                # By bucket; buckets stay.
        self._scalars: dict[float, Array] = {}                # The key is the weight decay; C reads the numbers.
        self._scalars_step = -1

    def initialise(self) -> None:
        self.whole_of(lambda nbytes: block_of_the_node(self.channel, nbytes, "parameters and optimizer state"))

    def open(self, optimizer: Optimizer, rate: Any) -> None:
        plain = (type(optimizer).change, type(optimizer).update) == (Optimizer.change, Optimizer.update)     # else the user's
        kernel = optimizer.kernel if self.channel.fuses and plain else None
        self._part = part_function(kernel, self.storage.values.dtype) if kernel is not None else 0
        super().open(optimizer, rate)
        self._barrier = barrier(self.channel)

    def make_reducer(self) -> GradientReducer:
        cuts = self.context.placement.cuts(self.layout)
        if self.tree:                                         # The sums of a tree go by messages.
            return self.reducer_over(TreeSum(self.channel, self.tree), cuts=cuts)
        return self.reducer_over(self, cuts=cuts, allocate=lambda nbytes: shared_by_all(self.channel, nbytes, "gradients"))

    def own(self) -> list[Part]:
        return [part for bucket in self.reducer.buckets for part in self._slice(bucket).parts]

    def norm_of(self, own: Sequence[Segment]) -> GradientNorm:
        """Ranks of several nodes update the same parts: the first of them counts these."""
        once = own if self.channel.cross is None or self.channel.cross.rank == 0 else []
        if self.context.parts is None:
            return norm_of_node(self.channel, once)
        return GradientNorm(once, self.mesh, self.context.own_site)

    def update(self, gradients: Any, lr: float, scale: float) -> None:
        self.change(gradients, lr, scale, self.own())
        for segment in self.storage.segments:                 # The parts of other ranks change too.
            segment.parameter.mark_changed()

    @property
    def is_updated(self) -> bool:
        """Whether gradients are summed in slices, and nothing needs all of them first. The same on all ranks of a node, so that
        none reads weights that another has changed."""
        return not (self.needs_all_gradients or self.tree)

    def settle(self) -> None:
        self._barrier.run()

    def measured(self) -> Bytes:
        found, n = super().measured(), self.channel.node.size
        return found._replace(parameters=-(-found.parameters // n), optimizer=-(-found.optimizer // n))

    def way(self) -> str:
        """Slices are cut otherwise where there are several nodes."""
        return super().way() + (", one copy per node" if self.channel.cross is not None and not self.tree else "")

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        """The sum of this rank's slice of a bucket alone, which updates it where the update need not wait."""
        own = self._slice(bucket)
        then = partial(self._update_slice, own.parts) if own.parts else None
        collective = self.channel.prepare_sum_of_slice(arrays[0], bucket.name, own.within, then)

        def start() -> Work:
            passes = None
            if self.is_updated:
                for segment in bucket.segments:
                    segment.parameter.mark_changed(ADVICE)
                passes = self._passes(own, bucket.start)
            return collective.start(passes)
        return Prepared(start)

    def _slice(self, bucket: Bucket) -> OwnSlice:
        if bucket.index not in self._slices:
            node = self.channel.node
            self._slices[bucket.index] = OwnSlice(bucket, node.rank, node.size, whole=self.optimizer.whole_parameters)
        return self._slices[bucket.index]

    def _update_slice(self, parts: Sequence[Part]) -> None:
        """The update after a sum for which C had no passes."""
        if self.is_updated:
            self.change(self.reducer.gradients, self.rate(self.step - self.behind), segments=parts)

    def _passes(self, own: OwnSlice, start: int) -> Any:
        """The update of a slice, whose bucket begins at element `start`, for C; None where C cannot do it."""
        if not self._part or self.masks is not None:
            return None
        trained = [part.parameter.requires_grad for part in own.parts]
        if own.passes is None or own.trained != trained:      # Parameters may be frozen from one step to the next.
            runs = self.optimizer.runs(own.parts)
            own.trained, own.passes = trained, (Pass * len(runs))(*(
                Pass(self._part, self.optimizer.parts(run), self._scalars_for(run.decay), run.start - start, run.stop - start)
                for run in runs))
        if self._scalars_step != self.step:
            self._scalars_step = self.step
            for decay, scalars in self._scalars.items():
                scalars[...] = self._numbers(decay)
        return own.passes

    def _numbers(self, decay: float) -> tuple[float, ...]:
        return self.optimizer.scalars(decay, self.rate(self.step - self.behind), self.step + 1 - self.began, self.optimizer.sign)

    def _scalars_for(self, decay: float) -> Array:
        if decay not in self._scalars:
            values = self._numbers(decay)
            self._scalars[decay] = np.array(values, self.storage.values.dtype)
        return self._scalars[decay]


KNOWN = (Replicated, ShardedOptimizer, ShardedGradients, ShardedParameters)      # the policies that have one copy per node


def one_per_node(asked: type[Policy], setup: Setup, shared: Any) -> Policy:
    """The policy with one copy on each node, as far as there is anything to have one of."""
    mesh, kind = setup.context.mesh, setup.config.comm.sharding
    if shared.size < mesh[mesh.axes].size:
        refuse_unlike_nodes(mesh, shared)
    several, why = shared.size > shared.node.size, ""
    if not shared.shared:
        refuse_copies(shared)
        why = "every rank keeps a copy of its own"
    elif asked is ShardedParameters and several:
        why = (f'with comm.sharding = "{kind}" on several nodes a rank keeps slices, of which there are no copies, and puts '
               "blocks together for itself")
    if why:
        policy: Policy = asked(setup, shared.messages if asked.cuts_gradients else shared)
        policy.said.append(f"comm.node_shared: {why}")
        return policy
    if asked is Replicated or (asked is ShardedOptimizer and not several):
        return NodeShared(setup, shared)                      # All ranks that share the copy are on one node.
    of_copy = ShardedOptimizer if asked is ShardedOptimizer else ShardedGradients       # Its parameters lie in the one copy.
    return of_copy(setup, shared, NodeCopy(shared))
