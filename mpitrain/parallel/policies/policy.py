"""A policy: how the ranks of a run keep parameters, gradients and optimizer state, and how they exchange gradients.

    setup -> policy -> initialise() -> storage -> an optimizer of it -> open(optimizer) -> each step: begin(), backward, finish()

The registry is in `config.sections`; a user's own is `comm.sharding = "file.py:name"`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from mpitrain.backend import Array, Device, asnumpy
from mpitrain.comm.face import AnyChannel
from mpitrain.config import Config
from mpitrain.config.rules import Rule
from mpitrain.errors import GraphError, NumericsError
from mpitrain.kernels.optimizer import NORM
from mpitrain.nn import FlatLayout, FlatStorage
from mpitrain.optim import Optimizer, Segment, clip_factor
from mpitrain.parallel.connect import ParallelContext
from mpitrain.parallel.gradients.bucket_sum import BucketSum
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.scaled_rows import ScaledRows
from mpitrain.parallel.gradients.statistics import Statistics
from mpitrain.parallel.policies.alone import Alone
from mpitrain.parallel.policies.late_norm import LateNorm
from mpitrain.parallel.policies.way import way_of
from mpitrain.placement.bytes import Bytes
from mpitrain.placement.shards import Shards

Evaluate = Callable[[bool], tuple[float, Array]]


class Outcome(TypedDict):
    """The outcome of a step: learning rate, global norm before clipping (None where nobody asked), seconds of waiting."""

    lr: float
    grad_norm: float | None
    comm_exposed_s: float


@dataclass(frozen=True)
class Setup:
    """The arguments of a policy: the same on all ranks, but for their places on the mesh."""

    config: Config
    context: ParallelContext                 # this rank's part of the model, and the channels to other ranks
    device: Device
    algorithm: Any = "auto"                  # the gradients' all-reduce: a name, or a user's function
    optimizer: Callable[[Any], Optimizer] | None = None      # makes the run's optimizer of a storage; None: there is none


class Policy(ABC):
    """Made, and used, by all ranks alike, in the order above.

    An author says in `initialise` where values lie and what part of them this rank's optimizer updates (`storage`), in
    `make_reducer` how gradients are added up, and in `update` what happens to the parameters then. What follows from one step to
    the next by itself is here: the norm, clipping, running statistics. `channel` connects the ranks that hold the same part of
    the model; `notes` says what could not be had, `choices` what bits depend on. `__init__`, `initialise` and `open` raise
    ConfigError or StorageError, on all ranks.
    """

    rules: ClassVar[Sequence[Rule]] = ()     # Rules of compatibility, beside `config.rules`.
    shards: Shards | None = None             # The slices of this rank; None where arrays are whole.
    cuts: ClassVar[str] = "none"             # The states that ranks have slices of, one of `config.sections.STATES`.
    cuts_gradients: ClassVar[bool] = False   # Whether a bucket's memory is used again before the step is over.
    cuts_parameters: ClassVar[bool] = False  # Whether a rank puts blocks together while they compute.
    private: Any = None                      # What the run has spent of privacy, where it hides its rows: `train.build.privacy`.
    masters = False                          # Whether slices of float32 lie apart from parameters that are rounded.
    packed: Any = None                       # The `packed.PackedParameters` of slices, where they travel so.
    per_node = False                         # Whether the ranks of a node share one copy of the parameters.
    compressed: Any = None                   # The `compress.channel.CompressedSum` of the gradients, where they travel so.
    layout: FlatLayout
    storage: Any                             # An `optimizer.Storage`, whose segments are parts of parameters.
    values: Array                            # The array of this rank's parameters.
    reducer: GradientReducer
    norm: GradientNorm
    statistics: Statistics

    def __init__(self, setup: Setup, channel: AnyChannel):
        self.setup, self.channel, self.context = setup, channel, setup.context
        self.mesh, self.stage, self.tree = setup.context.mesh, setup.context.stage, setup.context.placement.tree
        self.bucket_bytes = setup.config.comm.bucket_bytes
        self.clip_norm = setup.config.optimizer.clip_norm
        self.step = 0                        # Updates done.
        self.behind = 0                      # Steps by which the learning rate has been set back.
        self.began = 0                       # The step after which the optimizer began anew.
        self.masks: Any = None               # A `shrink.masks.Masks`, which each update ends with.
        self.level: Any = Alone()            # Or a `levels.level.Level`: how this site meets others.
        self.goes_on = setup.config.train.on_nan != "stop"
        self.loss_scale: Any = None          # A `loss_scale.LossScale`, where gradients are of a format that underflows.
        self.numbers: Any = None             # The numbers of the step, for the optimizer, where the scale decides.
        if str(setup.config.train.precision) == "float16":
            from mpitrain.parallel.policies.loss_scale import LossScale
            self.loss_scale = LossScale(setup.device.xp)
        self.blamed = ""                     # The parameter whose gradient was the first not finite in the last step, if one was.
        self.want_norm = True                # a norm costs a pass over the gradients: it is computed where asked for, or to clip
        self.choices: dict[str, Any] = {}
        self.said: list[str] = []            # Notes of the policy, beside those of its channel.

    @property
    def notes(self) -> list[str]:
        """Options that could not be had, a line each; complete once the policy is open."""
        return [*self.channel.notes, *self.said]

    def initialise(self) -> None:
        """Gives the stage's model its memory and initial values. Sets `layout`, where all of its parameters lie in flat arrays,
        and `storage`, what this rank updates of them: an optimizer is made of it."""
        self.whole_of(None)

    @abstractmethod
    def make_reducer(self) -> GradientReducer:
        """The reducer that adds up the gradients of micro-batches and ranks, for `layout`."""

    @abstractmethod
    def update(self, gradients: Any, lr: float, scale: float) -> None:
        """Changes the parameters; `gradients` times `scale` are the summed and clipped ones of `storage`."""

    def change(self, gradients: Any, lr: float, scale: float = 1.0, segments: Sequence[Segment] | None = None) -> None:
        """The optimizer's update of `segments` of the storage (default: all), and the zeros of pruned weights there."""
        numbers = {} if self.numbers is None else {"numbers": self.numbers}
        self.optimizer.update(gradients, lr=lr, step=self.step + 1 - self.began, scale=scale, segments=segments, **numbers)
        if self.masks is not None:
            self.masks.apply(segments)
            self.optimizer.round(segments)
            self.masks.clear(self.optimizer.averaged_weights(segments))

    def publish(self) -> None:
        """Gives all ranks the values that each has written to its `own` parts outside of an update. It communicates."""
        self.refresh()
        for segment in self.layout.segments:
            segment.parameter.mark_changed()
        self.settle()

    def own(self) -> Sequence[Segment]:
        """The parts of parameters whose gradients this rank has, and updates."""
        found: Sequence[Segment] = self.storage.segments
        return found

    def own_gradients(self, gradients: Array) -> Any:
        """The flat gradients of `storage`, out of those of the reducer."""
        return gradients

    def norm_of(self, own: Sequence[Segment]) -> GradientNorm:
        """The norm of the gradient of the whole model, of which this rank has `own`. It communicates."""
        return GradientNorm(own, self.mesh, self.context.parts)

    def unlike(self, step: int) -> Sequence[str]:
        """The kinds of state of which ranks with the same part have bits of their own after `step`: others are compared."""
        return ()

    def settle(self) -> None:                                # noqa: B027  (most have nothing to do)
        """The end of an update. By default every rank has written memory of its own."""

    def refresh(self) -> None:
        """Rounds the values to the copies in 16 bits that operations read, if there are any, after others wrote values."""
        if isinstance(self.layout, FlatStorage):
            self.layout.refresh()

    def values_written(self) -> None:                        # noqa: B027
        """Drops what was made of the old parameters, after a checkpoint has written new ones."""

    def way(self) -> str:
        """How gradients are added up, as far as bits depend on it. It communicates."""
        return way_of(self.channel, bool(self.tree))

    def whole_of(self, allocate: Callable[[int], Any] | None) -> None:
        """`initialise` where each rank sees all parameters, in memory of `allocate` (default: the device's own)."""
        config, device = self.setup.config, self.setup.device
        self.layout = self.storage = self.stage.model.initialize(config.run.seed, config.train.precision, device, allocate)
        self.values = self.layout.values

    def open(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        """Ready for steps, with the learning rate as a function of the step. It communicates."""
        self.optimizer, self.rate = optimizer, rate
        self.reducer = self.make_reducer()
        self.reducer.reserve()                                # Now, so that `notes` is complete.
        own = self.own()
        self.norm, self.tied = self.norm_of(own), self.context.tied_parameters(own)
        self.statistics = Statistics(self.stage.chunks, self.channel if self.tree else self.context.replicas, self.tree)
        self.rows = ScaledRows(self.stage.chunks, self.statistics.channel)
        self._late = None if self.goes_on or optimizer.needs_closure else LateNorm.of(self.norm, self.setup.device)
        self._say_choice(self.layout.dtype.name)
        self._thawing = [s.parameter for s in self.layout.segments if 0 < s.parameter.trained_from < math.inf]

    def reducer_over(self, bucket_sum: BucketSum, **options: Any) -> GradientReducer:
        """The reducer of whole gradients whose buckets `bucket_sum` adds up; `options` as `GradientReducer` has them."""
        return GradientReducer(self.layout, bucket_sum, bucket_bytes=self.bucket_bytes, chunks=self.stage.sizes,
                               progress=self.mesh.progress.progress, **options)

    def begin(self) -> None:
        """To be called before the first forward of a step."""
        for parameter in self._thawing:
            parameter.requires_grad = self.step >= parameter.trained_from
        self.level.begin(self.step)
        self.reducer.begin()

    def finish(self, again: Evaluate | None = None) -> Outcome:
        """The rest of the exchange, then the update, unless `blamed`. NumericsError before any parameter changes.

        `again(begun)` is for an optimizer that needs a closure: the loss over all ranks of the step's batch, where the parameters
        are now, and the reducer's gradient; where `begun`, of the exchange that this call has ended.
        """
        gradients = self.own_gradients(self.reducer.finish())
        lr, norm, self.blamed = self.rate(self.step - self.behind), None, ""
        self.rows.apply()
        if not self.is_updated:                               # A step added here belongs into `needs_all_gradients`, too.
            if self.tied is not None:
                self.tied.add(gradients)
            due = self.level.mix(gradients)                   # Whether a gradient has come from the other sites, if it must.
            norm, scale = self._norm_and_scale(gradients)
            if due and not self.blamed and not self.optimizer.needs_closure:
                self.update(gradients, lr * self.level.rate_factor, scale)
            elif due and not self.blamed:
                self.minimise(again, lr)
        self.optimizer.steps = self.step + 1 - self.began
        self.settle()
        if self.blamed:
            self.statistics.total()                           # They are left out as the gradients are.
        else:
            self.statistics.apply()
        self.step += 1
        self.level.end(self.step, lr)
        return {"lr": lr, "grad_norm": norm, "comm_exposed_s": self.reducer.exposed_s}

    def wait(self) -> None:
        """Waits for the norm of a step on a device that nobody has looked at. NumericsError where it was not finite."""
        if self._late is not None:
            self._late.wait()

    def minimise(self, again: Evaluate | None, lr: float) -> None:
        """The update by an optimizer that computes the loss several times."""
        if again is None:
            raise GraphError(f"{type(self.optimizer).__name__} needs a closure, and finish() got none")
        evaluate = again
        begun = [True]
        self.optimizer.minimise(lambda: evaluate(begun.pop() if begun else False), lr)

    @property
    def is_updated(self) -> bool:
        """Whether parameters have been updated bucket by bucket when the last sum is there."""
        return False

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `finish` does more than update: anything that must see, or change, gradients before the first parameter
        changes. One copy per node updates bucket by bucket wherever this is False, and skips the rest. The same on all ranks."""
        return (bool(self.clip_norm) or self.want_norm or self.tied is not None or self.loss_scale is not None or
                self.level.needs_gradients)

    def measured(self) -> Bytes:
        """Bytes of this rank's parameters, gradients and optimizer state, measured; of shared arrays, this rank's share."""
        copies = getattr(self.layout, "compute", None)
        parameters = self.values.nbytes + (0 if copies is None else copies.nbytes)
        return Bytes(parameters, self.reducer.gradients.nbytes, self.optimizer.nbytes)

    def _norm_and_scale(self, gradients: Any) -> tuple[float | None, float]:
        """The norm, where it is wanted, and the factor of clipping. NumericsError, or `blamed`, where the norm is not finite.

        Clipping (Pascanu, Mikolov, Bengio, 2013) scales the gradient so that its global norm is at most `clip_norm`.
        """
        if self.loss_scale is not None:                       # What is not finite is no fault: the next scale is smaller.
            self.numbers = self.loss_scale.finish(self.norm, gradients, self.clip_norm)
            return float(asnumpy(self.numbers)[NORM]) if self.want_norm else None, 1.0
        self.numbers = None
        if not (self.clip_norm or self.want_norm):
            return None, 1.0
        self.wait()
        if self._late is not None and not self.want_norm:
            self.numbers = self._late.conclude(self.norm, gradients, self.clip_norm, self.step + 1)
            return None, 1.0
        norm = self.norm(gradients)
        if not math.isfinite(norm):
            self.blamed = self.norm.worst(gradients)          # All ranks meet here: they have the same norm.
            if not self.goes_on:
                raise NumericsError(f"the gradient of {self.blamed} is not finite; no parameter was changed; "
                                    "try a smaller optimizer.lr, or optimizer.clip_norm", step=self.step + 1)
            return norm, 1.0
        return norm, clip_factor(norm, self.clip_norm) if self.clip_norm else 1.0

    def _say_choice(self, dtype: str) -> None:
        """Two runs with equal choices add the ranks' gradients in the same order, and round them alike."""
        channel, wire = self.channel, self.setup.config.comm.wire_dtype
        if channel.size == 1:
            return
        by_messages = not channel.shared or channel.cross is not None or bool(channel.notes)
        travels = wire if dtype == "float32" and by_messages else dtype
        coded = travels if self.compressed is None else self.compressed.make.text
        self.choices["exchange"] = {"ranks": channel.size, "way": self.way(), "wire": coded}
        if self.packed is not None:
            self.choices["exchange"]["parameters"] = self.packed.text
        if wire not in ("float32", travels):
            self.said.append(f'comm.wire_dtype = "{wire}" has no effect: ' + (
                "it is for gradients of float32" if dtype != "float32" else
                "gradients go through shared memory, not by messages"))
