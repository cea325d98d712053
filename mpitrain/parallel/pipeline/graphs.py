"""Forward and backward of a micro-batch as captured graphs of the device: a launch instead of some hundred.

    first time of a shape   runs as ever: kernels are compiled, plans are made
    second time             the same code runs while a stream captures, which computes nothing; then the graph is launched
    from then on            x, y and the gradient to start from are copied to where the graph reads them, and it is launched

What Python did during the capture does not happen again, so what depends on the step stays outside: the batch, the count of
terms, the keys of random numbers, which kernels read from a small array that is filled before each launch, and the hooks of
parameters, which the engine notes instead of calling them; they are called after each launch, and fold arenas as ever. A graph
belongs to the arena that its gradients go to. What is computed within one lies in memory of all graphs, since they are launched
one after the other: a step of many micro-batches has several arenas, and so several graphs.

Where buckets leave for other ranks while backward runs, it is cut where one is complete, into graphs that are launched one after
the other. The hooks of a part start the exchange, behind its launch and before the next:

    device    | forward, backward to bucket 0 | backward to bucket 1 | ... rest |
    exchange                                  | bucket 0 ...         | bucket 1 ...

(One graph could record an event for each bucket instead, but CuPy 14.2 has no cudaEventRecordWithFlags.)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, run_backward
from mpitrain.autograd.mode import holding_hooks
from mpitrain.backend import Array, Device, random
from mpitrain.data import MicroBatch
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.stored_keys import MOST, Pinned, StoredScope, Uncapturable
from mpitrain.placement.buckets import Bucket

Key = tuple[Any, ...]
Finals = list[tuple[Tensor, Array]]
Forward = Callable[[Array, Array], Tensor]


@dataclass
class Captured:
    """Graphs, each with the leaves whose gradients it makes final, in that order; what they read, and what they write."""

    parts: list[tuple[Any, Finals]]
    x: Array
    y: Array
    feed: Feed
    start: Array
    loss: Array
    drawn: StoredScope
    began_with: float = math.nan

    def fill(self, x: Any, y: Any, start: float, micro: MicroBatch, pinned: Pinned) -> None:
        """Writes what a launch reads. `x` and `y`, those of `micro`, may be on the device already."""
        self.feed.fill(self.x, x)
        self.feed.fill(self.y, y)
        if start != self.began_with:
            self.start.set(np.asarray(start, self.start.dtype))
            self.began_with = start
        self.drawn.fill(micro.step, micro.first, pinned)

    def launch(self, progress: Callable[[], None]) -> Array:
        """The loss. `progress` is called between the parts, to move what is on its way."""
        for i, (graph, finals) in enumerate(self.parts):
            if i:
                progress()
            graph.launch()
            for leaf, grad in finals:
                leaf.grad = grad
                for hook in leaf.grad_hooks:
                    hook(leaf)
        return self.loss.copy()


class Cutter:
    """Cuts a capture where a bucket can leave: between the nodes of backward, once it and those before it are complete.

    `held` are the leaves whose gradients have become final, in order; without `buckets` nothing is cut.
    """

    def __init__(self, stream: Any, held: list[Tensor], buckets: list[Bucket]):
        self.parts: list[tuple[Any, Finals]] = []
        self._stream, self._held, self._buckets, self._seen, self._left, self._noted = stream, held, buckets, 0, 0, 0
        self._waiting = [sum(s.parameter.requires_grad for s in bucket.segments) for bucket in buckets]
        self._bucket_of = {id(s.parameter): i for i, bucket in enumerate(buckets) for s in bucket.segments}

    def between_nodes(self) -> None:
        for leaf in self._held[self._noted:]:
            if id(leaf) in self._bucket_of:
                self._waiting[self._bucket_of[id(leaf)]] -= 1
        self._noted, before = len(self._held), self._left
        while self._left < len(self._buckets) and not self._waiting[self._left]:
            self._left += 1
        if before < self._left < len(self._buckets):          # The last one leaves at the end, which is near.
            self.end()
            self._stream.begin_capture()

    def end(self) -> None:
        """The end of a part."""
        graph = self._stream.end_capture()
        self.parts.append((graph, [(leaf, leaf.grad) for leaf in self._held[self._seen:]]))
        self._seen = len(self._held)


class Graphs:
    """The graphs of one stage that is the whole model. `forward` gives the summed loss of (inputs, targets) on the device.

    Those of KEPT micro-batches are kept: of a shape, an arena, and a place in the step.
    """

    KEPT = 16

    def __init__(self, device: Device, feed: Feed, reducer: GradientReducer, forward: Forward, *, wanted: bool, seed: int = 0):
        self.device, self.feed, self.reducer, self.forward = device, feed, reducer, forward
        self.scale: Callable[[Array], Array] | None = None     # Of the gradient that backward begins with: the loss scale.
        self.seed = seed                              # Of random numbers, as the pipeline has it.
        self.wanted = wanted                          # Not only where it works: what cannot be captured ends the run.
        self.why_not = ""                             # The reason why nothing is captured any more.
        self._seen: OrderedDict[Key, None] = OrderedDict()     # What has run as ever, the least recent first.
        self._known: OrderedDict[Key, Captured] = OrderedDict()                  # Likewise.
        self._room: tuple[Any, Any, Pinned] | None = None      # Memory pool of all graphs, stream that captures, and for keys.

    @property
    def pools(self) -> list[Any]:
        """The pools of memory of the graphs."""
        return [] if self._room is None else [self._room[0]]

    def run(self, micro: MicroBatch, total: Callable[[], float], *, last: bool) -> Array | None:
        """The loss, once the graphs have been launched and the hooks called; None: the micro-batch is to be run as ever.

        The arena of its gradients is ready; `total` gives the count of terms of the step; buckets leave while the `last`
        micro-batch of a step runs. Uncapturable where graphs are `wanted`.
        """
        if self.why_not:
            return None
        x, y = micro.there or (self.feed.host_inputs(micro.x), self.feed.host_targets(micro.y))
        seen = x.shape, str(x.dtype), y.shape, str(y.dtype), self.reducer.arena, tuple(
            s.parameter.requires_grad for s in self.reducer.storage.segments)
        buckets = self.reducer.buckets if last and self.reducer.bucket_sum.size > 1 else []
        key = seen, tuple(bucket.stop for bucket in buckets)
        if key not in self._known and not _used(self._seen, seen, 4 * self.KEPT):
            return None
        start = 1.0 / (total() or 1.0)
        if key not in self._known:
            try:
                found = self._capture(x, y, len(micro.x), buckets)
            except (Uncapturable, RuntimeError, MemoryError) as error:      # CuPy's errors of a capture are RuntimeErrors.
                self.why_not = str(error)
                for segment in self.reducer.storage.segments:        # What the capture has got so far was never computed.
                    segment.parameter.grad = None
                if self.wanted:
                    raise Uncapturable(f"train.graph = \"on\", but the step cannot be captured: {error}") from error
                return None
            self._known[key] = found
        self._known.move_to_end(key)
        assert self._room is not None
        self._known[key].fill(x, y, start, micro, self._room[2])
        return self._known[key].launch(self.reducer.progress)

    def _capture(self, x: Any, y: Any, count: int, buckets: list[Bucket]) -> Captured:
        xp, cuda = self.device.xp, self.device.xp.cuda
        self.device.synchronize()
        while len(self._known) >= self.KEPT:                  # Nothing that it writes is on its way now.
            self._known.popitem(last=False)
        x_here, y_here = self.feed.room(x), self.feed.room(y)
        start = xp.empty((), self.feed.dtype)
        drawn = StoredScope(xp.empty(MOST, xp.uint64), count, self.seed)
        if self._room is None:                                # A pool's free memory is that of a stream.
            self._room = pool_of_graphs(cuda), cuda.Stream(non_blocking=True), Pinned(xp)
        pool, stream, _ = self._room
        xp.get_default_memory_pool().free_all_blocks()        # What the run before took; else both would have theirs.
        with (cuda.using_allocator(pool.malloc), stream, random.use(drawn), holding_hooks() as held,
              refusing_uploads(xp)):
            cutter = Cutter(stream, held, buckets)
            stream.begin_capture()
            try:
                loss = self.forward(x_here, y_here)
                run_backward(loss, start if self.scale is None else self.scale(start), progress=cutter.between_nodes)
            except BaseException:
                abandon(stream)
                raise
            cutter.end()
        return Captured(cutter.parts, x_here, y_here, self.feed, start, loss.array, drawn)


def pool_of_graphs(cuda: Any) -> Any:
    """A pool whose free memory stays the device's: graphs that were captured before write there at each launch.

    CuPy's pool gives what is free back to the driver where the driver has no more, and asks again; but it does so for the
    driver's own error alone. A MemoryError ends the capture, and the step runs as ever.
    """
    def allocate(nbytes: int) -> Any:
        try:
            return cuda.MemoryPointer(cuda.Memory(nbytes), 0)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{nbytes} bytes for captured graphs: {error}") from error
    return cuda.MemoryPool(allocate)


def _used(known: OrderedDict[Key, None], key: Key, most: int) -> bool:
    """Whether the key was among the `most` last ones; it is now."""
    found = key in known
    known[key] = None
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
    return found


@contextmanager
def refusing_uploads(xp: Any) -> Iterator[None]:
    """Inside, values of the host do not go up to the device: Uncapturable, of this thread alone.

    CuPy would not refuse. It copies them by way of pinned memory, which it uses again once the copy is over; but a graph copies
    from there at each launch, and finds what others have left.
    """
    own, usual = get_ident(), xp.get_default_pinned_memory_pool().malloc

    def allocate(nbytes: int) -> Any:
        if get_ident() == own:
            raise Uncapturable("values of the host go up to the device in each step, and a graph would read them where they no "
                               "longer are")
        return usual(nbytes)
    xp.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        xp.cuda.set_pinned_memory_allocator(usual)


def abandon(stream: Any) -> None:
    """Ends a capture that has failed, whatever the driver says of it."""
    try:
        if stream.is_capturing():
            stream.end_capture()
    except RuntimeError:
        pass
