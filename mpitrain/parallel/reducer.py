"""Sums gradients over micro-batches and ranks, while backward is still running.

    engine                           GradientReducer                       Work, moved by progress()
     last contribution to W3 ----->  bucket 0: waiting 1 -> 0
       (written into the arena)      fold micro-batches, start   ------>   post receives and sends
     next node ...                                               ------>   add a chunk, post the next
     last contribution to W2 ----->  bucket 1 ...
     end of backward                 finish(): start what no hook completed, wait for all

Each micro-batch gets an arena of its own and they are added up as a binary tree over the micro-batch's index, not one after
the other: `grad +=` would be a left fold, whose rounding depends on how many micro-batches this rank has. The sums of
finished sub-trees are kept like the digits of a binary counter, so log2(M) + 1 arenas are enough for M micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from mpitrain.backend import Array
from mpitrain.nn import FlatStorage, Parameter
from mpitrain.parallel.buckets import Bucket, cut_buckets, plan_buckets
from mpitrain.parallel.timeline import Timeline


class Work(Protocol):
    done: bool

    def test(self) -> bool: ...
    def wait(self) -> None: ...


class Channel(Protocol):
    """What the reducer asks of `comm.Channel`."""

    size: int

    def start_allreduce(self, array: Array, name: str) -> Work: ...


class Mover(Protocol):
    """What the reducer asks of `comm.ProgressThread`."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    def hand_over(self, work: Work) -> None: ...
    def take_back(self) -> None: ...


class GradientReducer:
    """Owns the gradient arenas of one rank; `gradients` is the flat sum once `finish` has returned.

    A parameter that took no part in a micro-batch is skipped in the sums, never added as zeros; one that took part nowhere
    gets the gradient zero. `allocate` makes the memory of an arena (the storage's own by default).
    """

    def __init__(self, storage: FlatStorage, channel: Channel, *, bucket_bytes: int = 4 << 20,
                 allocate: Callable[[], Array] | None = None, progress: Callable[[], None] | None = None):
        self.storage, self.channel = storage, channel
        self.mover: Mover | None = None                     # where set, it moves the buckets rather than `progress`
        self.timeline = Timeline()
        self._progress = progress
        self.buckets = plan_buckets(storage.segments, storage.values.size, max(1, bucket_bytes // storage.values.itemsize))
        self._allocate = allocate or storage.new_flat
        self._arenas: list[Array] = []
        self._views: list[list[Array]] = []                 # per arena, each parameter's part of it
        self._filled: list[list[bool]] = []                 # per arena, which parameters it holds a sum of
        self._place = {segment.name: i for i, segment in enumerate(storage.segments)}
        self._micro, self._last, self._arena = -1, False, 0
        self._works: list[Work] = []
        self._started = 0                                   # buckets start in index order, the same on all ranks
        self.exposed_s = 0.0                                # time spent waiting after the last local backward
        self._hook()

    def _hook(self) -> None:
        for bucket in self.buckets:
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

    def begin(self) -> None:
        """A new step: forgets the last one's sums."""
        self._micro, self._last, self._started = -1, False, 0
        self._works.clear()
        for bucket in self.buckets:
            bucket.stack.clear()
        self.timeline.begin(len(self.buckets))

    def begin_micro_batch(self, *, last: bool) -> None:
        """The next backward fills a fresh arena; after the `last` one of this step, buckets leave as they fill."""
        self._settle()
        self._micro += 1
        self._last = last
        self._arena = self._micro.bit_count()               # as many sums are held as the counter has ones
        views, filled = self._arena_views(self._arena), self._filled[self._arena]
        for i, segment in enumerate(self.storage.segments):
            segment.parameter.grad, segment.parameter.grad_buffer = None, views[i]
            filled[i] = False
        for bucket in self.buckets:
            bucket.waiting = len(bucket.segments)

    def finish(self) -> Array:
        """Starts what no hook has started, waits for everything, and returns the flat sum."""
        began = time.perf_counter()
        if not self._last:                                  # no micro-batch here this step: our part of the sum is zero
            self._settle()
        self._start_until(len(self.buckets))
        if self.mover is not None:
            self.mover.take_back()
        for work in self._works:
            work.wait()
            self.timeline.look()
        self._works.clear()
        self._last, self._micro = False, -1
        self.exposed_s = self.timeline.finish(began).exposed_s
        views = self._arena_views(0)
        for segment, view in zip(self.storage.segments, views):
            segment.parameter.grad = view
        return self.gradients

    def _is_final(self, bucket: Bucket, parameter: Parameter) -> None:
        bucket.waiting -= 1
        if not self._last:
            return
        self.timeline.parameter_ready(parameter.name)
        if bucket.waiting == 0:
            self.timeline.ready(bucket.index)
        ready = self._started
        while ready < len(self.buckets) and self.buckets[ready].waiting == 0:
            ready += 1
        self._start_until(ready)

    def _start_until(self, stop: int) -> None:
        while self._started < stop:
            bucket = self.buckets[self._started]
            self._started += 1
            if self._last:
                self._push(bucket)
            self._collapse(bucket)
            if self.channel.size > 1:
                self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        part, began = self._arena_at(0)[bucket.start:bucket.stop], time.perf_counter()
        with self.mover.lock if self.mover is not None else nullcontext():    # a work that ends uses the channel's buffers too
            work = self.channel.start_allreduce(part, bucket.name)
            self.timeline.started(bucket.index, work, began)
        self._works.append(work)
        if self.mover is not None:
            self.mover.hand_over(work)

    def _settle(self) -> None:
        """Puts the sums of the micro-batch that has just ended onto every bucket's stack."""
        if self._micro >= 0 and not self._last:
            for bucket in self.buckets:
                self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        """Adds the current arena's part to the counter: two sums of equal size become one of twice the size."""
        for segment in bucket.segments:
            self._filled[self._arena][self._place[segment.name]] = segment.parameter.grad is not None
        bucket.stack.append(0)
        while len(bucket.stack) > 1 and bucket.stack[-1] == bucket.stack[-2]:
            self._fold(bucket)

    def _collapse(self, bucket: Bucket) -> None:
        """Folds what is left on the stack into arena 0, and zeroes what nobody filled."""
        while len(bucket.stack) > 1:
            self._fold(bucket)
        views, filled = self._arena_views(0), self._filled[0]
        for segment in bucket.segments:
            i = self._place[segment.name]
            if not bucket.stack or not filled[i]:
                views[i][...] = 0
                filled[i] = True

    def _fold(self, bucket: Bucket) -> None:
        """Replaces the two topmost sums by their sum; sum number k of a stack lies in arena k."""
        upper = len(bucket.stack) - 1
        lower = upper - 1
        bucket.stack.pop()
        bucket.stack[-1] += 1
        places = [self._place[segment.name] for segment in bucket.segments]
        below, above = self._filled[lower], self._filled[upper]
        if all(below[i] and above[i] for i in places):
            self._arena_at(lower)[bucket.start:bucket.stop] += self._arena_at(upper)[bucket.start:bucket.stop]
            return
        for i in places:
            if above[i] and below[i]:
                self._views[lower][i] += self._views[upper][i]
            elif above[i]:
                self._views[lower][i][...] = self._views[upper][i]
                below[i] = True

    def _arena_at(self, index: int) -> Array:
        while len(self._arenas) <= index:
            arena = self._allocate()
            arena[...] = 0                                  # the padding between parameters is summed too
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
