"""How a bucket of gradients is added up over the ranks: what each has of it by an all-reduce, or by the nodes of one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel, Work
from mpitrain.placement.buckets import Bucket
from mpitrain.placement.tree import RankTree


class BucketSum(Protocol):
    """What a `GradientReducer` asks: an object of this file, or a policy that adds up buckets in a way of its own."""

    @property
    def size(self) -> int:
        """How many ranks have a part in the sum. With one, and without a `tree`, nothing is started."""
    @property
    def tree(self) -> RankTree | None:
        """The tree over the micro-batches of all ranks of which the ranks hold nodes; None: each rank has one sum of its own."""
    def start(self, bucket: Bucket, arrays: Sequence[Array]) -> Work | None:
        """Begins to add up what the ranks have in `arrays`: the bucket's part of one arena, or with a `tree` an array for each
        node; the result lands in the first of them. None where no other rank has a part in it."""


class AllReduce:
    """Every rank has the whole sum."""

    tree = None

    def __init__(self, channel: AnyChannel):
        self.channel, self.size = channel, channel.size

    def start(self, bucket: Bucket, arrays: Sequence[Array]) -> Work:
        channel: AnyChannel = bucket.apart or self.channel
        return channel.start_allreduce(arrays[0], bucket.name)


class TreeSum:
    """Every rank has the whole sum, whose order of addition is that of the micro-batches on any number of ranks."""

    def __init__(self, channel: AnyChannel, tree: RankTree):
        self.channel, self.size, self.tree = channel, channel.size, tree

    def start(self, bucket: Bucket, arrays: Sequence[Array]) -> Work | None:
        return self.tree.start(self.channel, arrays, bucket.name)
