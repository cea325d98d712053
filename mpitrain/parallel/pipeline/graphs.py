"""Forward and backward of a micro-batch as one captured graph of the device: a launch instead of some hundred.

    first time of a shape   runs as ever: kernels are compiled, plans are made
    second time             the same code runs while a stream captures, which computes nothing; then the graph is launched
    from then on            x, y and the gradient to start from are copied to where the graph reads them, and it is launched

What Python did during the capture does not happen again, so what depends on the step stays outside: the batch, the count of
terms, the keys of random numbers, which kernels read from a small array that is filled before each launch, and the hooks of
parameters, which the engine notes instead of calling them; they are called after each launch, and fold arenas as ever. A graph
belongs to the arena that its gradients go to. What is computed within one lies in memory of all graphs, since they are launched
one after the other: a step of many micro-batches has several arenas, and so several graphs.
"""

from __future__ import annotations

import math
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
from mpitrain.errors import ConfigError
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.pipeline.feed import Feed

Key = tuple[Any, ...]
Forward = Callable[[Array, Array], Tensor]


class Uncapturable(ConfigError):
    """Something in a step cannot be part of a graph."""


class StoredScope(random.Scope):
    """The scope of a capture, whose numbers change from launch to launch: kernels read them from memory of the device.

    `numbers` (MOST,) uint64 begins with the row of the first sample in the global batch; then comes a key for each use of a layer
    that draws, in the order of use. `fill` writes those of a step. `samples` are consecutive.
    """

    MOST = 1024

    def __init__(self, numbers: Array, count: int, seed: int):
        super().__init__(seed)
        self.numbers, self.count = numbers, count
        self.places: dict[tuple[str, int], int] = {}  # of keys in `numbers`, by layer and use

    def copy(self) -> StoredScope:
        made = StoredScope(self.numbers, self.count, self.seed)
        made.places, made.uses, made.kept = self.places, dict(self.uses), self.kept
        return made

    def key(self, layer: str) -> Array:
        use = self.uses.get(layer, 0)
        self.uses[layer] = use + 1
        place = self.places.setdefault((layer, use), len(self.places) + 1)
        if place >= self.MOST:
            raise Uncapturable(f"layer {layer} is one of more than {self.MOST - 1} that draw random numbers")
        return self.numbers[place:place + 1]

    def rows(self, n: int, xp: Any) -> Array:
        found: Array | None = self.kept.get((n, xp))
        if found is None:
            each, rest = divmod(n, self.count)
            if rest:
                raise Uncapturable(f"random numbers for {n} rows are drawn in a batch of {self.count} samples")
            found = self.kept[n, xp] = xp.arange(n, dtype=xp.uint64) + self.numbers[:1] * xp.uint64(each)
        return found

    def fill(self, step: int, first: int) -> None:
        """Brings up what a launch reads: at most 8 kB, of which a key has 8 bytes."""
        if self.places:
            keys = (random.stream_key(self.seed, step, layer, use) for layer, use in self.places)
            values = np.array([first, *keys], np.uint64)
            self.numbers[:len(values)].set(values)


@dataclass
class Captured:
    """A graph, what it reads, what it writes, and the leaves whose gradients it made final, in that order."""

    graph: Any
    x: Array
    y: Array
    start: Array
    loss: Array
    finals: list[tuple[Tensor, Array]]
    drawn: StoredScope
    began_with: float = math.nan

    def launch(self, x: Any, y: Any, start: float, micro: MicroBatch) -> Array:
        """`x` and `y`, those of `micro`, may be on the device already."""
        for target, values in ((self.x, x), (self.y, y)):
            if isinstance(values, np.ndarray):
                target.set(np.ascontiguousarray(values, target.dtype))
            else:
                target[...] = values
        if start != self.began_with:
            self.start.set(np.asarray(start, self.start.dtype))
            self.began_with = start
        self.drawn.fill(micro.step, micro.first)
        self.graph.launch()
        for leaf, grad in self.finals:
            leaf.grad = grad
            for hook in leaf.grad_hooks:
                hook(leaf)
        return self.loss.copy()


class Graphs:
    """The graphs of one stage that is the whole model. `forward` gives the summed loss of (inputs, targets) on the device."""

    def __init__(self, device: Device, feed: Feed, reducer: GradientReducer, forward: Forward, *, wanted: bool, seed: int = 0):
        self.device, self.feed, self.reducer, self.forward = device, feed, reducer, forward
        self.scale: Callable[[Array], Array] | None = None     # Of the gradient that backward begins with: the loss scale.
        self.seed = seed                              # Of random numbers, as the pipeline has it.
        self.wanted = wanted                          # Not only where it works: what cannot be captured ends the run.
        self.why_not = ""                             # The reason why nothing is captured any more.
        self._known: dict[Key, Captured | None] = {}
        self._room: tuple[Any, Any] | None = None              # The memory pool of all graphs, and the stream that captures.

    @property
    def pools(self) -> list[Any]:
        """The pools of memory of the graphs."""
        return [] if self._room is None else [self._room[0]]

    def run(self, micro: MicroBatch, total: Callable[[], float]) -> Array | None:
        """The loss, once the graph has been launched and the hooks have been called; None: the micro-batch is to be run as ever.

        The arena of its gradients is ready; `total` gives the count of terms of the step. Uncapturable where graphs are `wanted`.
        """
        if self.why_not:
            return None
        x, y = micro.there or (self.feed.host_inputs(micro.x), self.feed.host_targets(micro.y))
        key = x.shape, str(x.dtype), y.shape, str(y.dtype), self.reducer.arena, tuple(
            s.parameter.requires_grad for s in self.reducer.storage.segments)
        if key not in self._known:
            self._known[key] = None
            return None
        start = 1.0 / (total() or 1.0)
        found = self._known[key]
        if found is None:
            try:
                found = self._known[key] = self._capture(x, y, len(micro.x))
            except (Uncapturable, RuntimeError, MemoryError) as error:      # CuPy's errors of a capture are RuntimeErrors.
                self.why_not = str(error)
                for segment in self.reducer.storage.segments:        # What the capture has got so far was never computed.
                    segment.parameter.grad = None
                if self.wanted:
                    raise Uncapturable(f"train.graph = \"on\", but the step cannot be captured: {error}") from error
                return None
        return found.launch(x, y, start, micro)

    def _capture(self, x: Any, y: Any, count: int) -> Captured:
        xp, cuda = self.device.xp, self.device.xp.cuda
        x_here, y_here = xp.empty(x.shape, x.dtype), xp.empty(y.shape, y.dtype)
        start = xp.empty((), self.feed.dtype)
        drawn = StoredScope(xp.empty(StoredScope.MOST, xp.uint64), count, self.seed)
        if self._room is None:
            self._room = cuda.MemoryPool(), cuda.Stream(non_blocking=True)     # A pool's free memory is that of a stream.
        pool, stream = self._room
        self.device.synchronize()
        xp.get_default_memory_pool().free_all_blocks()        # What the run before took; else both would have theirs.
        with (cuda.using_allocator(pool.malloc), stream, random.use(drawn), holding_hooks() as held,
              refusing_uploads(xp)):
            stream.begin_capture()
            try:
                loss = self.forward(x_here, y_here)
                run_backward(loss, start if self.scale is None else self.scale(start))
            except BaseException:
                abandon(stream)
                raise
            graph = stream.end_capture()
        return Captured(graph, x_here, y_here, start, loss.array, [(leaf, leaf.grad) for leaf in held], drawn)


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
