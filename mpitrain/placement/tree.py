"""One tree over the micro-batches of all ranks: what a rank holds of it, and how the ranks complete it.

    micro-batches   0   1   2   3   4   5
    rank            0   0   0   1   1   1       rank 0 holds the sum [0,2) and 2 by itself, rank 1 holds 3 and [4,6)
    tree           ((0 + 1)+(2 + 3))+(4 + 5)    what the exchange does with these four sums

A micro-batch in which a parameter took no part is no zero in its sum: it is left out, on one rank as on eight. Between ranks
nothing says who left out what: -0.0 is sent, which is exactly neutral (x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from mpitrain.backend import Array, array_module
from mpitrain.schedules.microtree import Node, joins, micro_tree, nodes_of, share, width
from mpitrain.schedules.steps import Algorithm


class Work(Protocol):
    """What is in flight: `test` moves it on and says whether it has landed, `wait` returns when it has."""

    @property
    def done(self) -> bool: ...
    def test(self) -> bool: ...
    def wait(self) -> None: ...


class Channel(Protocol):
    size: int

    def start_steps(self, array: Array, name: str, steps: Algorithm, /) -> Work: ...


class RankTree:
    """What rank `rank` of `n` holds of the tree over `n_micro` micro-batches: its own are first:stop, `nodes` their sums."""

    def __init__(self, n_micro: int, rank: int, n: int):
        self.n_micro, self.n = n_micro, n
        self.first, self.stop = share(rank, n, n_micro)
        self.nodes = nodes_of(n_micro, n)[rank]
        self.width = width(n_micro, n)
        self._steps = partial(micro_tree, n_micro=n_micro)     # one object: channels keep plans by it
        self._joined: dict[str, Array] = {}

    def joins(self, left: Node, right: Node) -> bool:
        """Whether two neighbouring sums are to be added now."""
        return joins(left, right, self.n_micro)

    def start(self, channel: Channel, sums: Sequence[Array], name: str) -> Work | None:
        """Begins to add up all ranks' sums, one flat array for each of `nodes`; the result lands in the first of them.

        None on one rank, whose only sum is the result. `channel` must have the ranks of this tree.
        """
        assert len(sums) == len(self.nodes) and channel.size == self.n
        if self.n == 1:
            return None
        if self.width == 1:
            return channel.start_steps(sums[0], name, self._steps)
        data, length = self._room(sums[0], name), sums[0].size
        for slot, addend in enumerate(sums):
            data[slot * length:(slot + 1) * length] = addend
        return Landing(channel.start_steps(data, name, self._steps), data[:length], sums[0])

    def forget(self) -> None:
        """Lets go of memory of exchanges that will not come again; nothing may be in flight."""
        self._joined.clear()

    def _room(self, like: Array, name: str) -> Array:
        """Memory for `width` sums one after another, made once for each name."""
        if name not in self._joined:
            self._joined[name] = array_module(like).zeros(self.width * like.size, like.dtype)
        return self._joined[name]


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
