"""Optimizer: changes flat slices of a model's parameters in place, guided by the table of where each lives.

    optimizer = AdamW(model, lr=1e-3)             # a plain loop
    loss.backward(); optimizer.step(); optimizer.zero_grad()

    optimizer.update(gradients, lr=lr, step=step, scale=clip)     # a trainer, which owns the flat gradients
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.kernels.kernel import Kernel
from mpitrain.optim.layout import ALIGN, Allocate, Condensed, Segment, StateShape, Storage
from mpitrain.optim.places import memory_of
from mpitrain.registry import Registry


class Run(NamedTuple):
    """Elements [start, stop) that are updated alike; `matrix` is False for biases and gains (fewer than two dims)."""

    start: int
    stop: int
    decay: float
    matrix: bool
    shape: tuple[int, ...] = ()                   # of the parameter, where a run is a whole one


class Held(NamedTuple):
    """A state of an optimizer: a flat array in the layout of `storage`, for the parameters whose names are `among` it. Its parts
    have the parameters' shapes, or those that `shape` makes of them."""

    kind: str
    storage: Any
    flat: Array
    among: Callable[[str], bool] | None = None
    shape: StateShape | None = None


class Optimizer:
    """`state` maps a name ("m") to a flat array of the storage's layout; `allocate` supplies its memory (default: what
    supplied the storage's own).

    `decay` says which parameters `weight_decay` is for: "all", or "matrices" (two dims or more). A parameter described
    with ``decay=False`` is never decayed, and one that is frozen (``requires_grad = False``) stays as it is. Subclasses name
    their state, and define `kernel` and `scalars` where the rule treats each element by itself, else `change`. `maximize` climbs:
    the gradients' signs are turned on their way in.
    """

    whole_parameters = False                      # True: the rule needs norms of whole parameters, so it cannot update parts.
    __signature__: inspect.Signature
    needs_closure = False                         # True: `step` asks for the loss and the gradient several times (L-BFGS).
    sends = False                                 # True: it says what ranks send in the place of gradients (`one_bit.OneBit`).
    averages: Sequence[str] = ()                  # The states that are weights themselves, means of them: pruned where these are.
    condensed = False                             # True: states have shapes of their own, `state_shape`, by whole parameters.
    prefix = "optimizer"                          # of its states in checkpoints
    kernel: Kernel | None = None                  # The kernel takes values, gradients, all of the state, and `scalars`.
    by_step: Sequence[tuple[int, int, float]] = ()     # The scalars that depend on the step: (which, `kernels.RATE` ..., beta).

    def __init_subclass__(cls, **keys: Any) -> None:
        """The arguments are those of `__init__`, wherever somebody asks for them; `__new__` has none of its own."""
        super().__init_subclass__(**keys)
        whole = inspect.signature(cls.__init__)
        cls.__signature__ = whole.replace(parameters=list(whole.parameters.values())[1:])

    def __new__(cls, model: Any = None, *positional: Any, **keys: Any) -> Any:
        """An optimizer of a model or its storage; of a list of parameters or groups, a `groups.Grouped` of this kind."""
        if cls.__name__ != "Grouped" and not cls.needs_closure and isinstance(model, Iterable) \
                and not hasattr(model, "segments") and not hasattr(model, "storage"):
            lr = positional[0] if positional else keys.pop("lr", None)
            return OF_LISTS["groups"](cls, model, lr, keys)
        return super().__new__(cls)

    def __init__(self, model: Any, lr: float, *, state: Sequence[str] = (), weight_decay: float = 0.0, decay: str = "all",
                 maximize: bool = False, allocate: Allocate | None = None):
        storage: Storage | None = getattr(model, "storage", model)
        if storage is None:
            raise GraphError("the optimizer needs a model with memory; call initialize() on the model first")
        if decay not in ("all", "matrices"):
            raise ConfigError(f'decay is "all" or "matrices", not "{decay}"')
        require(0.0 <= lr < float("inf"), "lr", lr, "a number >= 0")
        require(0.0 <= weight_decay < float("inf"), "weight_decay", weight_decay, "a number >= 0")
        self.storage, self.lr, self.weight_decay, self.decay = storage, lr, weight_decay, decay
        self.sign = -1.0 if maximize else 1.0
        self.layout = Condensed(storage, self.state_shape) if self.condensed else storage
        self.state: dict[str, Array] = {name: self.layout.new_flat(allocate or storage.allocate) for name in state}
        self.steps = 0
        self.numbers: dict[str, Any] = {}         # Small arrays of NumPy that a resumed run needs besides, changed in place.
        ordered = [s for s in storage.segments if s.stop > s.start]
        self._follows = {a.stop: b.start for a, b in zip(ordered, ordered[1:])}
        self._extents = {s.name: (s.start, s.stop) for s in storage.segments}
        self._on_device = array_module(memory_of(storage.values)) is not np
        self.launch: Any = False if type(self).change is Optimizer.change else None   # A `OneLaunch`; False: not looked for yet.
        self._frozen: list[str] | None = None
        self._all_runs: list[Run] = []

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        """Changes the parameters in `segments` (default: all) in place; `gradients` is flat and is only read.

        `step` counts updates from 1 (bias corrections need it); `scale` multiplies the gradients on the way in. On a device part
        of it may lie in `numbers`, those of `kernels.optimizer.conclude_norm`: their factor multiplies the gradients, too, and
        where they say that a gradient was not finite nothing changes. Nobody waits for them, unless the rule is more than a
        kernel. Where the storage has `compute`, the 16-bit copy of the parameters, the update writes that, too.
        """
        if gradients.shape != self.storage.values.shape:
            raise ShapeError(f"the gradients are a flat array of shape {self.storage.values.shape}, got {gradients.shape}")
        runs = self._runs_of_all() if segments is None else self.runs(segments)
        if self._on_device or numbers is not None:
            from mpitrain.optim.one_launch import change
            change(self, runs, gradients, lr, step, self.sign * scale, numbers)
        else:
            for run in runs:
                self.change(run, gradients[run.start:run.stop], lr, step, self.sign * scale)
        for segment in self.storage.segments if segments is None else segments:
            segment.parameter.mark_changed()
        self.steps = step

    def round(self, segments: Sequence[Segment] | None = None) -> None:
        """Makes the copies in 16 bits of the parameters in `segments` (default: all) anew, where the storage has such copies."""
        if self.storage.compute is not None:
            self.storage.refresh(segments)

    def minimise(self, evaluate: Callable[[], tuple[float, Array]], lr: float) -> float:
        """A step with `needs_closure`: `evaluate` gives the loss and the flat gradient where the parameters are."""
        raise GraphError(f"{type(self).__name__} needs no closure")

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        """The formula, on one run."""
        if self.kernel is None:
            raise GraphError(f"{type(self).__name__} defines neither a kernel nor change")
        values, *state = self.parts(run)
        self.kernel(values, gradients, *state, *self.scalars(run.decay, lr, step, scale))

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]:
        """What `kernel` takes after the arrays, for runs of that weight decay."""
        raise GraphError(f"{type(self).__name__} defines a kernel and no scalars")

    def parts(self, run: Run) -> tuple[Array, ...]:
        """The run's values and its parts of the state, in order."""
        place = self.layout.places[run.start] if isinstance(self.layout, Condensed) else slice(run.start, run.stop)
        return self.storage.values[run.start:run.stop], *(flat[place] for flat in self.state.values())

    @property
    def title(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    def held(self) -> list[Held]:
        """The states, and where they lie."""
        shape = self.state_shape if self.condensed else None
        return [Held(kind, self.layout, flat, shape=shape) for kind, flat in self.state.items()]

    def averaged_weights(self, segments: Sequence[Segment] | None = None) -> Iterator[tuple[Segment, Array]]:
        """The parts of `averages` for these segments (default: all), flat."""
        for segment in self.storage.segments if segments is None else segments:
            for kind in self.averages:
                yield segment, self.state[kind][segment.start:segment.stop]

    @staticmethod
    def state_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each state for a parameter of this shape: its own, unless the rule is `condensed`."""
        return shape

    def state_size(self, parameter: Any) -> int:
        """The elements that all states have for a parameter, with what lies between."""
        size: int = math.prod(self.state_shape(parameter.shape))
        return len(self.state) * -(-size // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return sum(flat.nbytes for flat in self.state.values())

    def step(self) -> Any:
        """One update with `self.lr` from the parameters' own gradients; a parameter without one is left alone."""
        arena = self.storage.attach_gradients()
        self.update(arena, lr=self.lr, step=self.steps + 1, segments=self.present())

    def restart(self) -> None:
        """Forgets all steps: states have their first values again."""
        for flat in self.state.values():
            flat.fill(0)
        self.steps = 0

    def present(self) -> list[Segment]:
        """The segments of the parameters that have a gradient, which lies in the storage's arena then."""
        present = []
        for segment in self.storage.segments:
            grad, view = segment.parameter.grad, segment.parameter.grad_buffer
            if grad is None:
                continue
            if grad is not view:                  # The gradient was computed before the arena existed.
                array_module(view).copyto(view, grad)
            present.append(segment)
        return present

    def zero_grad(self) -> None:
        """Forgets the gradients, so that the next backward starts anew."""
        for segment in self.storage.segments:
            segment.parameter.zero_grad()

    def _runs_of_all(self) -> list[Run]:
        frozen = [s.name for s in self.storage.segments if not s.parameter.requires_grad]
        if frozen != self._frozen:
            self._frozen, self._all_runs = frozen, self.runs(self.storage.segments)
        return self._all_runs

    def runs(self, segments: Sequence[Segment]) -> list[Run]:
        """Segments as few runs: neighbours that are updated alike become one, with the zeros between them.

        Without frozen parameters (`requires_grad` False), which decay must not change either.
        """
        runs: list[Run] = []
        for s in segments:
            if self.whole_parameters and (s.start, s.stop) != self._extents[s.name]:
                raise ShapeError(f"{type(self).__name__} needs whole parameters, got elements {s.start}:{s.stop} of "
                                 f'"{s.name}"; another optimizer works on parts')
            if s.stop == s.start or not s.parameter.requires_grad:
                continue
            matrix = s.parameter.ndim >= 2
            decay = self.weight_decay if s.decay and (matrix or self.decay == "all") else 0.0
            last = runs[-1] if runs else None
            if not self.whole_parameters and last and last.decay == decay and self._follows.get(last.stop) == s.start:
                runs[-1] = last._replace(stop=s.stop)
            else:
                runs.append(Run(s.start, s.stop, decay, matrix, s.parameter.shape))
        return runs


def require(fine: bool, name: str, value: object, expected: str) -> None:
    """ConfigError unless `fine`."""
    if not fine:
        raise ConfigError(f"optimizer.{name} is {expected}, not {value}")


OF_LISTS: Registry[Callable[..., Optimizer]] = Registry("maker of optimizers of lists")
OF_LISTS.register_later("groups", "mpitrain.optim.groups:of_list")
OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer")
"""Optimizers by name; each is called with the model (or its storage), lr, and its own keywords."""
for _name, _place in (("adagrad", "elementwise:Adagrad"), ("adadelta", "elementwise:Adadelta"), ("adamax", "elementwise:Adamax"),
                      ("nadam", "elementwise:NAdam"), ("radam", "elementwise:RAdam"), ("lion", "elementwise:Lion"),
                      ("asgd", "elementwise:ASGD"), ("rprop", "elementwise:Rprop"), ("adafactor", "matrices:Adafactor"),
                      ("muon", "matrices:Muon"), ("lbfgs", "lbfgs:LBFGS"), ("onebit_adam", "one_bit:OneBitAdam"),
                      ("onebit_lamb", "one_bit:OneBitLAMB"), ("zeroone_adam", "zero_one:ZeroOneAdam")):
    OPTIMIZERS.register_later(_name, f"mpitrain.optim.{_place}")
