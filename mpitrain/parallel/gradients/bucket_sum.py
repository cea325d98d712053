"""How a bucket of gradients is added up over the ranks: by an all-reduce, or along one tree over all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpitrain.backend import Array, array_module
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.comm.work import Collective, Work
from mpitrain.placement.buckets import Bucket
from mpitrain.schedules.microtree import RankTree


class BucketSum(Protocol):
    """The sum that a `GradientReducer` uses: an object of this file, or a policy that adds up buckets in its own way."""

    @property
    def size(self) -> int:
        """How many ranks have a part in the sum. With one, and without a `tree`, nothing is started."""
    @property
    def tree(self) -> RankTree | None:
        """The tree over the micro-batches of all ranks of which the ranks hold nodes; None: each rank has one sum of its own."""
    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective | None:
        """The sum of the ranks' `arrays`: the bucket's part of one arena, or with a `tree` an array for each node. The result
        lands in the first array. None where no other rank has a part in the sum."""


class AllReduce:
    """Every rank has the whole sum."""

    tree = None

    def __init__(self, channel: AnyChannel):
        self.channel, self.size = channel, channel.size

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        channel: AnyChannel = bucket.apart or self.channel
        return channel.prepare(arrays[0], bucket.name)


class TreeSum:
    """Every rank has the whole sum, whose order of addition is that of the micro-batches on any number of ranks.

    A micro-batch in which a parameter took no part is no zero in its sum: it is left out, on one rank as on eight. Between ranks
    nothing says who left out what: -0.0 is sent, which is exactly neutral (x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0).
    """

    def __init__(self, channel: AnyChannel, tree: RankTree):
        self.channel, self.size, self.tree = channel, channel.size, tree

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective | None:
        return prepare_tree(self.channel, self.tree, arrays, bucket.name)


def prepare_tree(channel: AnyChannel, tree: RankTree, sums: Sequence[Array], name: str) -> Collective | None:
    """Adds up all ranks' sums, one flat array for each of the tree's `nodes`; the result lands in the first of them.

    None on one rank, whose only sum is the result. `channel` must have the ranks of the tree.
    """
    assert len(sums) == len(tree.nodes) and channel.size == tree.n
    if tree.n == 1:
        return None
    if tree.width == 1:
        return channel.messages.prepare_steps(sums[0], name, tree.steps)
    length = sums[0].size
    joined = array_module(sums[0]).zeros(tree.width * length, sums[0].dtype)
    collective = channel.messages.prepare_steps(joined, name, tree.steps)

    def start() -> Work:
        for slot, addend in enumerate(sums):
            joined[slot * length:(slot + 1) * length] = addend
        return Landing(collective.start(), joined[:length], sums[0])
    return Prepared(start)


class Landing:
    """A collective whose result is copied to where it is wanted."""

    def __init__(self, work: Work, result: Array, target: Array):
        self.inner, self._result, self._target = work, result, target
        self.done = False

    def test(self) -> bool:
        if not self.done and self.inner.test():
            self._land()
        return self.done

    def wait(self) -> None:
        self.inner.wait()
        if not self.done:
            self._land()

    def _land(self) -> None:
        self._target[...] = self._result
        self.done = True
