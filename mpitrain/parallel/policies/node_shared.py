"""One copy of parameters and optimizer state on each node; every rank updates its slices of them.

    rank 0's gradients   [ slice 0 | slice 1 ] ...             parameters, m, v      [ slice 0 | slice 1 ] ...   one copy
    rank 1's gradients   [ slice 0 | slice 1 ] ...                                        ^ 0       ^ 1
                              \\_ sum __/  ->  rank 0 sums slice 0 of each bucket and updates it, block by block in the cache

No sum is written back to the others, no parameter is gathered, and a rank does 1/n of the optimizer's work. A bucket's slice is
summed when every rank of the node has the bucket's gradients; by then no backward needs the bucket's weights for a gradient of
theirs any more, so the update may follow at once. Who reads them without one (`detach`) is told: they count as changed from the
moment a bucket starts, on the rank that starts it, and no rank changes them before all ranks have. Where the norm is wanted first
(clipping, logging), or there are twins to add up, the updates wait. Between nodes, the same-numbered ranks sum their slices by
messages.

On a mesh, the data-parallel ranks of each stage, and of each place along tp, have a copy of what is theirs on each node. A
chunk's backwards run in the order of the micro-batches, and where they run in two halves, gradients of parameters come with the
second: after a parameter's last gradient no backward of its rank needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.messages.channel import AnyWork, Channel
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.engine import Pass
from mpitrain.comm.shared.queue import SharedWork
from mpitrain.kernels.optimizer import part_function
from mpitrain.nn import Module, Parameter
from mpitrain.optim import Optimizer
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.statistics import Statistics
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.parallel.policies.node_memory import Meeting, shared_by_all
from mpitrain.parallel.policies.replicated import Outcome, Replicated
from mpitrain.placement.bytes import Bytes
from mpitrain.placement.slices import Part, cut_slices, parts_of
from mpitrain.schedules.steps import Algorithm

ADVICE = ("comm.node_shared = true updates a parameter as soon as its gradient is complete, while backward still runs: where it "
          "is read without a gradient (detach), read a copy, Tensor(weight.numpy().copy()), or set comm.node_shared = false")


class Own(NamedTuple):
    """What a rank updates."""

    segments: list[Part]

    def once(self, shared: SharedChannel) -> Own:
        """These on the first of the ranks that update the same, each on its own node; nothing on the others."""
        return self if shared.cross is None or shared.cross.rank == 0 else Own([])


class NodeExchange:
    """What a `GradientReducer` takes for its channel: a sum of which each rank of the node keeps its slice alone."""

    def __init__(self, shared: SharedChannel, optimizer: Optimizer):
        self.shared, self.optimizer = shared, optimizer
        self.size, self.rank = shared.size, shared.rank
        self.arena: Array | None = None
        self.summed: Callable[[Sequence[Part]], None] = lambda parts: None     # called once for each bucket, when it is
        self.passes: Callable[[tuple[Part, ...], int], Any] = lambda parts, start: None     # or what C does with it instead
        self.starts: Callable[[Sequence[Parameter]], None] = lambda parameters: None        # called before a bucket's sum begins
        self._own: dict[tuple[int, int], tuple[tuple[int, int], tuple[Part, ...]]] = {}
        self._held: dict[tuple[int, int], list[Parameter]] = {}
        self._starts: dict[int, tuple[Array, int]] = {}       # where in the arena an array begins, which is slow to find out

    def allocate(self) -> Array:
        """Memory for one of the reducer's arenas. The first, where the sums are made, is in shared memory; else StorageError."""
        storage = self.optimizer.storage
        if self.arena is not None:
            return storage.new_flat()
        self.arena = storage.new_flat(lambda nbytes: shared_by_all(self.shared, nbytes, "gradients"))
        return self.arena

    def start_steps(self, array: Array, name: str, steps: Algorithm) -> AnyWork:
        """By messages: sums of the caller's own steps are whole on every rank."""
        return self.shared.start_steps(array, name, steps)

    def start_allreduce(self, array: Array, name: str) -> SharedWork:
        if id(array) not in self._starts:                     # the array is held on to, so that no other gets its id
            assert self.arena is not None
            self._starts[id(array)] = array, (array.ctypes.data - self.arena.ctypes.data) // self.arena.itemsize
        _, start = self._starts[id(array)]
        own, parts = self._slice(start, start + array.size)
        self.starts(self._held[start, start + array.size])
        passes = self.passes(parts, start)
        then = partial(self.summed, parts) if passes is None else None
        return self.shared.start_reduce_scatter(array, name, own, then, passes)

    def own(self, buckets: Sequence[Any]) -> Own:
        """This rank's parts of all buckets."""
        return Own([part for bucket in buckets for part in self._slice(bucket.start, bucket.stop)[1]])

    def _slice(self, start: int, stop: int) -> tuple[tuple[int, int], tuple[Part, ...]]:
        if (start, stop) not in self._own:
            segments, node = self.optimizer.storage.segments, self.shared.node
            slices = cut_slices(segments, start, stop, node.size, whole=self.optimizer.whole_parameters)
            own = slices[node.rank]
            self._held[start, stop] = [s.parameter for s in segments if start <= s.start and s.stop <= stop]
            self._own[start, stop] = (own.start - start, own.stop - start), tuple(parts_of(segments, own))
        return self._own[start, stop]


def norm_of_all(shared: SharedChannel, own: Any) -> GradientNorm:
    """The norm of a gradient that the ranks of `shared` have all parts of, without a message on a node. Collective."""
    return GradientNorm(own, channel=shared, allocate=lambda nbytes: shared_by_all(shared, nbytes, "the gradient norm"))


class NodeShared(Replicated):
    """The update of one copy per node; parameters and state lie in memory that the ranks of the node share.

    Equal to `Replicated` to the bit where that sums in the same order. `twins` are of `exchange.own`, and `norm` is of
    that once (default: over the ranks of the exchange).
    """

    def __init__(self, model: Module, optimizer: Optimizer, reducer: GradientReducer, channel: Channel,
                 rate: Callable[[int], float], exchange: NodeExchange, *, clip_norm: float = 0.0,
                 statistics: Statistics | None = None, norm: GradientNorm | None = None, twins: Twins | None = None):
        norm = norm or norm_of_all(exchange.shared, exchange.own(reducer.buckets).once(exchange.shared))
        super().__init__(model, optimizer, reducer, channel, rate, clip_norm=clip_norm, statistics=statistics, norm=norm,
                         twins=twins)
        self.exchange, self._meet = exchange, Meeting(exchange.shared)
        exchange.summed, exchange.passes, exchange.starts = self._summed, self._passes, self._starts
        plain = (type(optimizer).change, type(optimizer).update) == (Optimizer.change, Optimizer.update)     # not a user's own
        kernel = optimizer.kernel if exchange.shared.fuses and plain else None
        self._part = part_function(kernel, optimizer.storage.values.dtype) if kernel is not None else 0
        self._scalars: dict[float, Array] = {}                # by weight decay; C reads them
        self._scalars_step = -1
        self._known: dict[int, tuple[tuple[Part, ...], Any, list[bool]]] = {}

    def finish(self) -> Outcome:
        """The rest of the exchange, then the update of this rank's parts. NumericsError before any parameter changes."""
        gradients = self.reducer.finish()
        lr, norm = self.rate(self.step), None
        if self._waits:
            if self.twins is not None:
                self.twins.add(gradients)
            norm, scale = self._norm_and_scale(gradients)
            own = self.exchange.own(self.reducer.buckets)
            self.optimizer.update(gradients, lr=lr, step=self.step + 1, scale=scale, segments=own.segments)
            for segment in self.optimizer.storage.segments:   # the other ranks' parts change too
                segment.parameter.mark_changed()
        self.optimizer.steps = self.step + 1
        self._meet("parameters")
        self._update_buffers()
        self.step += 1
        return {"lr": lr, "grad_norm": norm, "comm_exposed_s": self.reducer.exposed_s}

    def measured(self) -> Bytes:
        """Of what the ranks of a node have together, this one's share."""
        found, n = super().measured(), self.exchange.shared.node.size
        return found._replace(parameters=-(-found.parameters // n), optimizer=-(-found.optimizer // n))

    @property
    def _waits(self) -> bool:
        """Whether the update needs the whole gradient first: for its norm, for twins, or because it was not summed in slices.

        The same on all ranks of a node: none reads what another has changed without knowing.
        """
        return bool(self.clip_norm) or self.want_norm or self.reducer.tree is not None or self.twins is not None

    def _starts(self, parameters: Sequence[Parameter]) -> None:
        if not self._waits:
            for parameter in parameters:
                parameter.mark_changed(ADVICE)

    def _summed(self, parts: Sequence[Part]) -> None:
        if not self._waits:
            self.optimizer.update(self.reducer.gradients, lr=self.rate(self.step), step=self.step + 1, segments=parts)

    def _passes(self, parts: tuple[Part, ...], start: int) -> Any:
        """The update of these parts, which lie in a bucket that begins at element `start`, for C; None where C cannot do it."""
        if self._waits or not self._part:
            return None
        trained = [part.parameter.requires_grad for part in parts]
        known = self._known.get(id(parts))
        if known is None or known[2] != trained:              # parameters may be frozen from one step to the next
            runs = self.optimizer.runs(parts)
            passes = (Pass * len(runs))(*(Pass(self._part, self.optimizer.parts(run), self._scalars_for(run.decay),
                                               run.start - start, run.stop - start) for run in runs))
            known = self._known[id(parts)] = parts, passes, trained
        if self._scalars_step != self.step:
            self._scalars_step = self.step
            for decay, scalars in self._scalars.items():
                scalars[...] = self.optimizer.scalars(decay, self.rate(self.step), self.step + 1, 1.0)
        return known[1]

    def _scalars_for(self, decay: float) -> Array:
        if decay not in self._scalars:
            values = self.optimizer.scalars(decay, self.rate(self.step), self.step + 1, 1.0)
            self._scalars[decay] = np.array(values, self.optimizer.storage.values.dtype)
        return self._scalars[decay]
