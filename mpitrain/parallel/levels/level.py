"""A level above the steps of a site: what `Policy` asks it in each step, and what sites have in common.

    policy.begin       level.begin(step)              before the first forward
    policy.finish      level.mix(gradients)           the site's sum is there, its norm is not
                       level.end(step, lr)            the update is done

A site is a group of ranks that train one model (mesh.site). Between meetings sites have parameters, running statistics and
optimizer states of their own. What is evaluated, and what a checkpoint calls the run's parameters, is the mean of the sites.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.nn import running_layers
from mpitrain.optim import Segment

if TYPE_CHECKING:
    from mpitrain.nn.parameter import Buffer
    from mpitrain.parallel.policies.policy import Policy

Parts: TypeAlias = "list[tuple[Segment, Array]]"              # (where a part of a parameter lies in the storage, its values)


class Level:
    """All ranks make one alike, with an open policy; methods that communicate are called alike by all."""

    needs_gradients = False                                   # Whether `mix` must see all gradients before the first update.
    trains_apart = False                                      # Whether sites have parameters and optimizer states of their own.
    rate_factor = 1.0                                         # What this site's learning rate is multiplied by.

    def __init__(self, policy: Policy):
        self.policy, self.storage = policy, policy.storage
        self.channel = policy.mesh.channel("site", "levels")
        self.n_sites, self.site = self.channel.size, self.channel.rank
        self.apart = False                                    # Whether parameters differ between sites now; the same on all.
        self.trained = [s for s in self.storage.segments if s.parameter.trained_from != float("inf")]
        self.frozen = [s for s in self.storage.segments if s.parameter.trained_from == float("inf")]
        self.size = sum(s.stop - s.start for s in self.trained)       # elements that this rank updates
        self.sent_bytes = 0                                   # that this rank has posted to other sites
        self.fields: dict[str, float] = {}                    # Of the last meeting, for metrics.jsonl.
        self.notes: list[str] = []
        self.there: dict[str, Collection[str]] = {}           # Of `passing`: the parameters that a checkpoint being read has.
        self.other: Any = None                                # The mean of the sites, and while that is in use this site's own.
        self._posted: dict[tuple[int, int], int] = {}
        layers = [layer for chunk in policy.stage.chunks for layer in running_layers(chunk)]
        self._running: list[Buffer] = [buffer for layer in layers for buffer in layer.buffers]
        self.other_running: np.ndarray[Any, Any] | None = None

    def begin(self, step: int) -> None:
        """Before the first forward of the step after `step` updates."""

    def mix(self, gradients: Any) -> bool:
        """Changes the gradients of `storage`, in place; whether parameters are to be updated by them."""
        return True

    def end(self, step: int, lr: float) -> None:
        """After update number `step`, whose learning rate was `lr`. It communicates."""

    def wait(self) -> None:
        """Waits for what is on its way, so that `states` can be saved."""

    def states(self) -> Mapping[str, Parts]:
        """What is equal on all sites, by name: ``outer/<name>/<parameter>`` of a checkpoint."""
        return {}

    def own_states(self) -> Mapping[str, Parts]:
        """What each site has of its own: ``workers/<site>/<name>/<parameter>``."""
        return {}

    def owned_states(self) -> Mapping[str, Parts]:
        """What is of the sum over sites, and kept by one site for each element: ``outer/<name>/<parameter>``."""
        return {}

    def numbers(self) -> dict[str, Any]:
        """Small arrays that are equal on all ranks, by name: ``sites/<name>`` of a checkpoint."""
        return {}

    def take_numbers(self, found: dict[str, Any]) -> None:
        """Those of a checkpoint."""

    def passing(self) -> Sequence[str]:
        """The names of what `states` has after some steps only."""
        return ()

    def resume(self, step: int, apart: bool, there: Mapping[str, Collection[str]]) -> str:
        """A checkpoint of that step is about to be read, into `states`: those of `there`, by name, for these parameters. Returns
        why this level cannot go on from there, or nothing."""
        self.apart = apart
        return ""

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's states, and of what is on its way."""
        return 0

    def count(self, nbytes: int) -> None:
        """So many bytes are on their way from this rank to other sites."""
        self.sent_bytes += nbytes

    def posted(self, length: int, itemsize: int = 0) -> int:
        """The bytes that this rank posts for a dense sum over the sites of so many elements, by default the parameters'."""
        from mpitrain.comm.messages.prepare import make_plan
        from mpitrain.comm.messages.signature import HEADER_BYTES
        from mpitrain.schedules.collectives import choose
        itemsize = itemsize or np.dtype(str(self.storage.dtype)).itemsize
        if (length, itemsize) not in self._posted:
            steps = choose(self.channel.steps, self.n_sites, itemsize * length)
            plan = make_plan(steps, self.site, self.n_sites, length, itemsize)
            sent = sum(stop - start for round_ in plan.rounds for _, start, stop, _ in round_.sends)
            self._posted[length, itemsize] = HEADER_BYTES + sent
        return self._posted[length, itemsize]

    def parts(self, flat: Array) -> Parts:
        """The parts of an array in the layout of `storage`."""
        return [(s, flat[s.start:s.stop]) for s in self.storage.segments]

    # -- the mean of the sites -------------------------------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model computes with the mean of the sites inside, and with its own parameters, to the bit, afterwards. It
        communicates."""
        if not self.apart:
            yield
            return
        self.take_mean()
        self.exchange()
        yield                                                 # An error inside ends the run.
        self.exchange()

    def finish(self) -> None:
        """The run is over: the mean of the sites is its result. It communicates."""
        self.wait()
        if self.apart:
            self.take_mean()
            self.exchange()
            self.apart = False

    def take_mean(self) -> None:
        """Puts the mean of the sites into `other`. It communicates."""
        if self.other is None:
            self.other = self.storage.new_flat()
        for s in self.storage.segments:
            self.other[s.start:s.stop] = self.storage.values[s.start:s.stop]
        self.mean_of(self.other)
        for s in self.frozen:                                 # Sites have these alike, and a mean would round them.
            self.other[s.start:s.stop] = self.storage.values[s.start:s.stop]
        if self._running:
            self.other_running = self.flat_running()
            self.mean_of(self.other_running)

    def mean_of(self, flat: Array) -> None:
        """Replaces an array that each site has by the mean over the sites."""
        self.channel.allreduce(flat, name="mean of the sites")
        self.count(self.posted(flat.size, flat.dtype.itemsize))
        flat *= flat.dtype.type(1.0 / self.n_sites)

    def flat_running(self) -> np.ndarray[Any, Any]:
        """The running statistics of this site as float64."""
        return np.concatenate([asnumpy(b.array).reshape(-1).astype(np.float64) for b in self._running])

    def put_running(self, flat: np.ndarray[Any, Any]) -> None:
        """Writes running statistics."""
        start = 0
        for b in self._running:
            b.array[...] = array_module(b.array).asarray(flat[start:start + b.size].reshape(b.shape), dtype=b.array.dtype)
            b.mark_changed()
            start += b.size

    def meet_running(self) -> None:
        """The running statistics of all sites become their mean. It communicates."""
        if self._running:
            flat = self.flat_running()
            self.mean_of(flat)
            self.put_running(flat)

    @property
    def running(self) -> Sequence[Buffer]:
        """The buffers that sites have of their own."""
        return self._running

    def exchange(self) -> None:
        """Swaps `other` and the parameters, and running statistics likewise. It communicates."""
        policy = self.policy
        before = [self.storage.values[s.start:s.stop].copy() for s in self.storage.segments]
        policy.settle()                                       # Nobody writes before all have read.
        for s in policy.own():
            self.storage.values[s.start:s.stop][...] = self.other[s.start:s.stop]
        policy.publish()
        for s, values in zip(self.storage.segments, before):
            self.other[s.start:s.stop] = values
        if self.other_running is not None:
            own = self.flat_running()
            self.put_running(self.other_running)
            self.other_running = own
