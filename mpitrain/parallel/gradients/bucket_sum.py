"""How a bucket of gradients is added up over the ranks: what each has of it by an all-reduce, or by the nodes of one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpitrain.backend import Array, array_module
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
    """Every rank has the whole sum, whose order of addition is that of the micro-batches on any number of ranks.

    A micro-batch in which a parameter took no part is no zero in its sum: it is left out, on one rank as on eight. Between ranks
    nothing says who left out what: -0.0 is sent, which is exactly neutral (x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0).
    """

    def __init__(self, channel: AnyChannel, tree: RankTree):
        self.channel, self.size, self.tree = channel, channel.size, tree

    def start(self, bucket: Bucket, arrays: Sequence[Array]) -> Work | None:
        bucket.room = self.room_for(arrays[0]) if bucket.room is None else bucket.room
        return self.add_up(arrays, bucket.name, bucket.room)

    def room_for(self, like: Array) -> Array:
        """Memory in which the sums that a rank sends lie one after another: none where each rank has one sum."""
        length = 0 if self.tree.width == 1 or self.tree.n == 1 else self.tree.width * like.size
        room: Array = array_module(like).zeros(length, like.dtype)
        return room

    def add_up(self, sums: Sequence[Array], name: str, room: Array) -> Work | None:
        """Begins to add up all ranks' sums, one flat array for each of the tree's nodes; the result lands in the first of them.

        None on one rank, whose only sum is the result. The channel must have the ranks of the tree.
        """
        tree, length = self.tree, sums[0].size
        assert len(sums) == len(tree.nodes) and self.size == tree.n
        if tree.n == 1:
            return None
        if tree.width == 1:
            return self.channel.start_steps(sums[0], name, tree.steps)
        for slot, addend in enumerate(sums):
            room[slot * length:(slot + 1) * length] = addend
        return Landing(self.channel.start_steps(room, name, tree.steps), room[:length], sums[0])


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
