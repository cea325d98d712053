"""Sums gradients over micro-batches and ranks, while backward is still running.

    engine                           GradientReducer                       Work, moved by progress()
     last contribution to W3 ----->  bucket 0: waiting 1 -> 0
       (written into the arena)      fold micro-batches, start   ------>   post receives and sends
     next node ...                                               ------>   add a chunk, post the next
     last contribution to W2 ----->  bucket 1 ...
     end of backward                 finish(): start what no hook completed, wait for all

Each micro-batch gets an arena of its own and they are added up as a binary tree over the micro-batch's index, not one after
the other: `grad +=` would be a left fold, whose rounding depends on how many micro-batches this rank has. The sums of
finished sub-trees (`microtree.Counter`) lie in log2(M) + 1 arenas at most for M micro-batches.

Without a `tree` each rank has a tree of its own micro-batches, and its sum is added to the others'. With one (`tree.py`) there is
one tree over the micro-batches of all ranks, and the ranks hold nodes of it: the bits do not depend on their number.

Where a rank holds several chunks of a model, whose backwards take turns, each chunk counts its micro-batches by itself (`Turn`).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

from mpitrain.backend import Array
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import ProgressThread
from mpitrain.comm.work import Work
from mpitrain.nn import FlatLayout, Parameter
from mpitrain.parallel.gradients.bucket_sum import BucketSum
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.placement.buckets import Bucket, Turn, cut_buckets, frozen_alike, plan_buckets, runs
from mpitrain.placement.shards import finer
from mpitrain.schedules.microtree import Counter, RankTree


class GradientReducer:
    """Owns the gradient arenas of one rank; `gradients` is the flat sum once `finish` has returned (where `bucket_sum` leaves
    each rank its slices, the sum of these alone).

    A parameter that took no part in a micro-batch is skipped in the sums, never added as zeros; one that took part nowhere
    gets the gradient zero (with a tree -0.0, which ranks add without changing a bit). `allocate` makes the memory of the arena
    that is summed over ranks (default: the storage's own). `chunks` and `cuts` are numbers of parameters, in the storage's order:
    of each chunk of the model (default: one chunk), and of runs that no bucket may join (default: chunks). `apart` has the
    channel of each parameter that is summed over other ranks than the rest, else None.
    """

    def __init__(self, storage: FlatLayout, bucket_sum: BucketSum, *, bucket_bytes: int = 4 << 20,
                 allocate: Callable[[int], Any] | None = None, progress: Callable[[], None] | None = None,
                 chunks: Sequence[int] | None = None, cuts: Sequence[int] | None = None,
                 apart: Sequence[Channel | None] | None = None):
        self.storage, self.bucket_sum, self.tree = storage, bucket_sum, bucket_sum.tree
        self.mover: ProgressThread | None = None                     # A mover moves the buckets in the place of `progress`.
        self.timeline = Timeline()
        self._progress = progress
        self._chunks = list(chunks or [len(storage.segments)])
        self._apart = list(apart or [None] * len(storage.segments))
        self.buckets = plan_buckets(storage.segments, storage.size, max(1, bucket_bytes // storage.dtype.itemsize),
                                    finer(cuts or self._chunks, [*accumulate(runs(self._apart)),
                                                                       *accumulate(frozen_alike(storage.segments))]))
        self._allocate = allocate
        self._arenas: list[Array] = []
        self._views: list[list[Array]] = []                 # The part of each parameter in each arena.
        self._filled: list[list[bool]] = []                 # Whether each arena holds a sum of each parameter.
        self._place = {segment.name: i for i, segment in enumerate(storage.segments)}
        self._turns: list[Turn] = []
        self._works: list[Work] = []
        self._started = 0                                   # Buckets start in index order, the same on all ranks.
        self.exposed_s = 0.0                                # Seconds of waiting after the last local backward.
        self._hook()

    def _hook(self) -> None:
        first, begins = self.tree.first if self.tree else 0, [0, *accumulate(self._chunks)]
        self._turns = [Turn(first) for _ in self._chunks]
        for bucket in self.buckets:
            turn = self._turns[bisect_right(begins, self._place[bucket.segments[0].name]) - 1]
            turn.buckets.append(bucket)
            bucket.sums = Counter(self.tree.joins) if self.tree else Counter()
            bucket.turn, bucket.apart = turn, self._apart[self._place[bucket.segments[0].name]]
            for segment in bucket.segments:
                segment.parameter.grad_hooks.append(partial(self._is_final, bucket))

    def cut(self, bounds: Sequence[int]) -> None:
        """Other buckets from the next step on: `bounds[k]` parameters, counted from the last one, lie in buckets 0 to k.

        Only between steps, and alike on all ranks.
        """
        self._unhook()
        self.buckets = cut_buckets(self.storage.segments, self.storage.size, bounds)
        self._hook()

    def progress(self) -> None:
        """To be called between nodes of backward: moves what is in flight, unless a thread does."""
        self.timeline.node_passed()
        if self.mover is None and self._progress is not None:
            self._progress()

    @property
    def gradients(self) -> Array:
        """The flat sum over all micro-batches of all ranks; valid between `finish` and the next `begin`."""
        return self._arena_at(0)

    @property
    def arenas(self) -> list[Array]:
        """The arrays of gradients: the sum, and those of micro-batches that are not added yet."""
        return list(self._arenas)

    @property
    def passing(self) -> list[Array]:
        """Memory that ranks share for buckets on their way."""
        return []

    def reserve(self) -> None:
        """Makes the memory that is summed over ranks now, rather than in the first step: it communicates where that is shared."""
        self._arena_at(0)

    def begin(self) -> None:
        """A new step: forgets the last one's sums."""
        self._started = 0
        self._works.clear()
        for turn in self._turns:
            turn.begin_step()
        for bucket in self.buckets:
            bucket.sums.nodes.clear()
        self.timeline.begin(len(self.buckets))

    @property
    def arena(self) -> int:
        """The number of the arena that the present micro-batch of the first chunk fills."""
        return self._turns[0].arena

    def begin_micro_batch(self, index: int | None = None, *, last: bool, chunk: int = 0) -> None:
        """The next backward of `chunk` fills a fresh arena; after the `last` one of this step, buckets leave as they fill.

        `index` counts over all ranks; only a `tree` needs it, and takes skipped micro-batches for absent.
        """
        turn = self._turns[chunk]
        self._settle(turn)
        turn.leaf = turn.next if self.tree is None or index is None else index
        for bucket in turn.buckets:
            self._push_absent(bucket, turn.leaf)
        turn.next, turn.last = turn.leaf + 1, last
        turn.arena = len(turn.buckets[0].sums.nodes) if turn.buckets else 0
        views, filled = self._arena_views(turn.arena), self._filled[turn.arena]
        for bucket in turn.buckets:
            bucket.waiting = sum(s.parameter.requires_grad for s in bucket.segments)
            for segment in bucket.segments:
                i = self._place[segment.name]
                segment.parameter.grad, segment.parameter.grad_buffer = None, views[i]
                filled[i] = False

    def finish(self) -> Array:
        """Starts what no hook has started, waits for everything, and returns the flat sum."""
        began = time.perf_counter()
        for turn in self._turns:
            if not turn.last:                               # No micro-batch ran here: our part of the sum is zero.
                self._settle(turn)
        self._start_until(len(self.buckets))
        if self.mover is not None:
            self.mover.take_back()
        for work in self._works:
            work.wait()
            self.timeline.look()
        self._works.clear()
        for turn in self._turns:
            turn.last, turn.leaf = False, -1
        self.exposed_s = self.timeline.finish(began).exposed_s
        views = self._arena_views(0)
        for segment, view in zip(self.storage.segments, views):
            segment.parameter.grad = view
        return self.gradients

    def _is_final(self, bucket: Bucket, parameter: Parameter) -> None:
        bucket.waiting -= 1
        if not bucket.turn.last:
            return
        if self.timeline.parameters is not None:
            self.timeline.parameter_ready(parameter.name)
        if bucket.waiting:
            return
        self.timeline.ready(bucket.index)
        ready = self._started
        while ready < len(self.buckets) and self.buckets[ready].waiting == 0 and self.buckets[ready].turn.last:
            ready += 1
        self._start_until(ready)

    def _start_until(self, stop: int) -> None:
        while self._started < stop:
            bucket = self.buckets[self._started]
            self._started += 1
            if bucket.turn.last:
                self._push(bucket)
            arrays = self._own_sum(bucket) if self.tree is None else self._own_nodes(bucket, self.tree)
            if bucket.trained and ((bucket.apart or self.bucket_sum).size > 1 or self.tree is not None):
                self._launch(bucket, arrays)

    def _launch(self, bucket: Bucket, arrays: list[Array]) -> None:
        began = time.perf_counter()
        with self.mover.lock if self.mover is not None else nullcontext():    # A work that ends uses the channel's buffers.
            if bucket.collective is None:
                bucket.collective = self.bucket_sum.prepare(bucket, arrays)
            if bucket.collective is None:                   # One rank holds the whole tree.
                return
            work = bucket.collective.start()
            self.timeline.started(bucket.index, work, began)
        self._works.append(work)
        if self.mover is not None:
            self.mover.hand_over(work)

    def _own_sum(self, bucket: Bucket) -> list[Array]:
        """Folds the sums left on the stack into arena 0, which is sent."""
        while len(bucket.sums.nodes) > 1:
            bucket.sums.fold(partial(self._fold, bucket))
        self._fill_absent(bucket, 0, 0.0)
        return [bucket.part(self._arenas, 0)]

    def _own_nodes(self, bucket: Bucket, tree: RankTree) -> list[Array]:
        """The nodes of the tree over all ranks that this rank holds, which are sent: sum number k lies in arena k."""
        self._push_absent(bucket, tree.stop)
        for slot in range(len(tree.nodes)):
            self._fill_absent(bucket, slot, -0.0)
        return [bucket.part(self._arenas, slot) for slot in range(len(tree.nodes))]

    def _settle(self, turn: Turn) -> None:
        """Puts the sums of the micro-batch that has just ended onto the stack of every bucket of its chunk."""
        if turn.leaf >= 0 and not turn.last:
            for bucket in turn.buckets:
                self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        """Adds the current arena's part to the counter: two sums that are halves of a node become its sum."""
        for segment in bucket.segments:
            self._filled[bucket.turn.arena][self._place[segment.name]] = segment.parameter.grad is not None
        bucket.sums.push(bucket.turn.leaf, partial(self._fold, bucket))

    def _push_absent(self, bucket: Bucket, until: int) -> None:
        """Counts the micro-batches from the next one to `until`, which have no rows in this step and so no sums."""
        for leaf in range(bucket.turn.next, until):
            arena = len(bucket.sums.nodes)
            self._arena_at(arena)
            for segment in bucket.segments:
                self._filled[arena][self._place[segment.name]] = False
            bucket.sums.push(leaf, partial(self._fold, bucket))

    def _fill_absent(self, bucket: Bucket, arena: int, value: float) -> None:
        """Gives `value` to the parameters that no micro-batch has filled. Zeros of those that are never trained are not even
        written, so that they take no memory."""
        views, filled = self._arena_views(arena), self._filled[arena]
        for segment in bucket.segments:
            i = self._place[segment.name]
            if segment.parameter.trained_from < math.inf and (not bucket.sums.nodes or not filled[i]):
                views[i][...] = value
                filled[i] = True

    def _fold(self, bucket: Bucket, lower: int) -> None:
        """Adds the newest sum to the one before it, number `lower`; sum number k lies in arena k."""
        upper = lower + 1
        places = [self._place[segment.name] for segment in bucket.segments]
        below, above = self._filled[lower], self._filled[upper]
        if all(below[i] and above[i] for i in places):
            below_part = bucket.part(self._arenas, lower)
            below_part += bucket.part(self._arenas, upper)
            return
        for i in places:
            if above[i] and below[i]:
                self._views[lower][i] += self._views[upper][i]
            elif above[i]:
                self._views[lower][i][...] = self._views[upper][i]
                below[i] = True

    def _arena_at(self, index: int) -> Array:
        while len(self._arenas) <= index:
            arena = self.storage.new_flat(None if self._arenas else self._allocate)      # Zeros: padding is summed too.
            self._arenas.append(arena)
            self._views.append(self.storage.views(arena))
            self._filled.append([False] * len(self.storage.segments))
        return self._arenas[index]

    def _arena_views(self, index: int) -> list[Array]:
        self._arena_at(index)
        return self._views[index]

    def _unhook(self) -> None:
        for segment in self.storage.segments:
            parameter: Any = segment.parameter
            parameter.grad_hooks = [h for h in parameter.grad_hooks if getattr(h, "func", None) != self._is_final]

    def close(self) -> None:
        """Lets go of the parameters: their hooks and gradient memory."""
        self._unhook()
        for segment in self.storage.segments:
            segment.parameter.grad = segment.parameter.grad_buffer = None
