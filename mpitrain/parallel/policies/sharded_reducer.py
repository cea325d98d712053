"""Gradients of which each rank keeps its slices: a bucket leaves as it fills, and its memory is used again.

    backward of micro-batch 0    bucket 2  ->  its sum to the owners of its slices  ->  added to the shard, memory free
                                 bucket 1  ->  ...
    backward of micro-batch 1    bucket 2  ->  ...

So a rank has its shard of the sum and a few buckets, whatever the size of the model. Each micro-batch's gradients are summed over
ranks by themselves, and those sums are added up in the order of the micro-batches. Ranks of a node that share one copy of the
parameters sum buckets in memory that they share (`bucket_memory`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.backend import Array
from mpitrain.comm.work import Work
from mpitrain.nn import Parameter
from mpitrain.parallel.gradients.bucket_sum import BucketSum
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.bucket_memory import BucketRing, BufferPool
from mpitrain.placement.buckets import Bucket, Turn
from mpitrain.placement.shards import Shards

IN_FLIGHT = 3                # Three buckets travel while one is filled: enough memory to hide their way.
SHARED_AT_ONCE = IN_FLIGHT + 2                                # So many buckets have a place in memory that ranks share.


@dataclass(slots=True)
class Seen:
    """The mark that the timeline keeps of a sum until the step ends; the sum itself would hold the memory of its bucket."""

    done: bool = False


class ShardedReducer(GradientReducer):
    """A reducer whose `gradients` are this rank's shard. `rounds` is the largest number of micro-batches that a rank has.

    A rank with fewer micro-batches adds zeros for the rest, so that every rank starts the same sums. `allocate` gives memory that
    ranks share, where they sum a few buckets at a time in it.
    """

    def __init__(self, shards: Shards, bucket_sum: BucketSum, *, bucket_bytes: int, progress: Callable[[], None] | None,
                 rounds: int, chunks: Sequence[int], allocate: Callable[[int], Any] | None = None):
        super().__init__(shards.layout, bucket_sum, bucket_bytes=bucket_bytes, progress=progress, chunks=chunks, cuts=shards.cuts)
        assert [(b.start, b.stop) for b in self.buckets] == [(u.start, u.stop) for u in shards.units]
        self.shards, self.rounds = shards, rounds
        self.shard = shards.new_flat()
        self.pool = BufferPool(shards.layout)
        self.ring = BucketRing(self.buckets, shards.layout, SHARED_AT_ONCE, allocate) if allocate else None
        self._open: dict[int, Array] = {}                     # The memory of each bucket that this backward fills.
        self._sent: deque[tuple[Bucket, Array, Work | None, Seen]] = deque()
        self._added = [0] * len(self.buckets)                 # How many sums of each bucket the shard has in this step.
        self._turn: Turn | None = None                        # The chunk whose backward runs.
        self._bucket_of = {s.name: bucket for bucket in self.buckets for s in bucket.segments}

    @property
    def gradients(self) -> Array:
        return self.shard

    @property
    def arenas(self) -> list[Array]:
        return [self.shard]

    @property
    def passing(self) -> list[Array]:
        return [] if self.ring is None else [self.ring.flat]

    def reserve(self) -> None:
        """The shard is there; buckets come with the first step."""

    def begin(self) -> None:
        self._added = [0] * len(self.buckets)
        for turn in self._turns:
            turn.begin_step()
            turn.next = 0
        self.timeline.begin(len(self.buckets))

    def begin_micro_batch(self, index: int | None = None, *, last: bool, chunk: int = 0) -> None:
        self._end_backward()
        self._turn = turn = self._turns[chunk]
        turn.leaf, turn.next, turn.last = turn.next, turn.next + 1, turn.next + 1 == self.rounds
        self._started = 0                                     # How many of the turn's buckets have started.
        for bucket in turn.buckets:
            bucket.waiting = sum(s.parameter.requires_grad for s in bucket.segments)
            for segment in bucket.segments:
                self._await(segment.parameter)

    def progress(self) -> None:
        super().progress()
        self._land(IN_FLIGHT)

    def finish(self) -> Array:
        began = time.perf_counter()
        self._end_backward()
        for chunk, turn in enumerate(self._turns):
            while turn.next < self.rounds:
                self.begin_micro_batch(last=True, chunk=chunk)
                self._end_backward()
        self._land(0)
        self.exposed_s = self.timeline.finish(began).exposed_s
        return self.shard

    def close(self) -> None:
        super().close()
        for segment in self.storage.segments:
            segment.parameter.lend = None

    def _await(self, parameter: Parameter) -> None:
        """Lets the next request for the memory of this parameter's gradient take a part of a bucket."""
        parameter.grad = None
        parameter.lend = self._lend
        parameter.grad_buffer = None
        del parameter.grad_buffer

    def _lend(self, parameter: Parameter) -> Array:
        bucket = self._bucket_of[parameter.name]
        if bucket.index not in self._open:
            self._open[bucket.index] = self._take(bucket)
        segment = self.storage.segments[self._place[parameter.name]]
        return self._open[bucket.index][segment.start - bucket.start:segment.stop - bucket.start].reshape(segment.shape)

    def _is_final(self, bucket: Bucket, parameter: Parameter) -> None:
        bucket.waiting -= 1
        turn = bucket.turn
        if turn.last and self.timeline.parameters is not None:
            self.timeline.parameter_ready(parameter.name)
        if bucket.waiting:
            return
        if turn.last:
            self.timeline.ready(bucket.index)
        while self._started < len(turn.buckets) and turn.buckets[self._started].waiting == 0:
            self._send(turn.buckets[self._started])

    def _end_backward(self) -> None:
        """Sends the buckets that no hook has sent, since some of their parameters took no part."""
        turn, self._turn = self._turn, None
        while turn is not None and self._started < len(turn.buckets):
            self._send(turn.buckets[self._started])

    def _send(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        self._started += 1
        flat = self._filled_bucket(bucket)
        work, seen = None, Seen()
        if self.bucket_sum.size > 1 and bucket.trained:
            collective: Any = bucket.collective or self.bucket_sum.prepare(bucket, [flat])
            if self.ring is not None:                         # With a ring, `flat` is the same each time.
                bucket.collective = collective
            work = collective.start()
            if bucket.turn.last:
                self.timeline.started(bucket.index, seen, began)
        self._sent.append((bucket, flat, work, seen))
        self._land(IN_FLIGHT)

    def _take(self, bucket: Bucket) -> Array:
        """Memory for a bucket's gradients: where ranks share it, in its place there, once that is free.

        Where a bucket that leaves before this one has yet to come to that place, other memory for now.
        """
        first = bucket.turn.buckets[0].index + self._started
        if self.ring is None or not self.ring.overlapping[bucket.index].isdisjoint(range(first, bucket.index)):
            return self.pool.take(bucket.stop - bucket.start)
        return self._place_of(bucket, self.ring)

    def _place_of(self, bucket: Bucket, ring: BucketRing) -> Array:
        """The bucket's place in shared memory, after sums that use it have ended."""
        common = ring.overlapping[bucket.index]
        last = max((i for i, (sent, *_) in enumerate(self._sent) if sent.index in common), default=-1)
        self._land(len(self._sent) - last - 1)
        return ring.views[bucket.index]

    def _filled_bucket(self, bucket: Bucket) -> Array:
        """The bucket's gradients, zero where there is none, and between parameters; they let go of the memory."""
        flat = self._open.pop(bucket.index, None)
        if flat is None:
            flat = self._take(bucket)
            flat.fill(0)
        end = bucket.start
        for segment in bucket.segments:
            flat[end - bucket.start:segment.start - bucket.start] = 0
            if segment.parameter.grad is None:
                flat[segment.start - bucket.start:segment.stop - bucket.start] = 0
            self._await(segment.parameter)
            end = segment.stop
        flat[end - bucket.start:] = 0
        if self.ring is not None and flat is not self.ring.views[bucket.index]:
            aside, flat = flat, self._place_of(bucket, self.ring)
            flat[...] = aside
        return flat

    def _land(self, most: int) -> None:
        """Adds buckets that have arrived to the shard, oldest first, and waits until at most `most` are on their way."""
        while self._sent:
            bucket, flat, work, seen = self._sent[0]
            if work is not None and not work.done and len(self._sent) <= most:
                return
            if work is not None:
                work.wait()
                seen.done = True
                self.timeline.look()
            self._sent.popleft()
            unit = self.shards.units[bucket.index]
            target = self.shard[unit.shard]
            if self._added[bucket.index]:
                target += flat[unit.within]
            else:
                target[...] = flat[unit.within]
            self._added[bucket.index] += 1
