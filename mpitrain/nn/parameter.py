"""Parameter and Buffer: leaves that are described first (shape, initial values) and get memory later.

Describing a model costs nothing, so a model too large for this machine can be described, cut and inspected on it; a
rank then allocates what it keeps, and makes only those values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.autograd.tensor import read_only
from mpitrain.backend import Array, stream_key
from mpitrain.errors import GraphError, ShapeError
from mpitrain.nn.arguments import Checked
from mpitrain.nn.init import Initialiser, Shape
from mpitrain.nn.rectangles import rectangles, runs

__all__ = ["Buffer", "Parameter"]

CHUNK = 1 << 16            # elements made at a time: the random words of a large parameter would not fit beside it


class Box(NamedTuple):
    """A slice of a leaf's whole array: which elements of this part it is, and where its first element lies in the whole."""

    own: tuple[slice, ...]
    start: Shape


class Described(Checked, Tensor):
    """A leaf whose shape is known before its memory exists; touching `array` before then raises GraphError.

    `name` is its path in the model. `placement` says which mesh axis it is cut along: {axis: dim}. `global_shape` is
    its shape before cutting and `offset` the place of this part's first element in it.

    A dim may stack several things that are cut alike, such as queries, keys and values: `groups` of equal length each. Then a
    part holds the same range of each group, one behind the other:

        groups = 3, 8 rows each, of which [2, 4) are kept:      - - q q - - - -   - - k k - - - -   - - v v - - - -
    """

    __slots__ = ("_groups", "_shape", "global_shape", "init", "name", "offset", "placement")
    is_leaf_of_model = True

    def __init__(self, shape: Sequence[int], init: Initialiser):
        super().__init__(np.empty(0, np.float32))
        del self.array                            # until somebody gives it memory
        try:
            self._shape: Shape = tuple(index(n) for n in shape)
        except TypeError:
            raise ShapeError(f"the shape of a {self._kind()} has whole numbers, got {shape!r}") from None
        if any(n < 0 for n in self._shape):
            raise ShapeError(f"the shape of a {self._kind()} has no negative numbers, got {self._shape}")
        self.init = init
        self.name = ""
        self.placement: dict[str, int] = {}
        self.global_shape: Shape = self._shape
        self.offset: Shape = (0,) * len(self._shape)
        self._groups: tuple[int, int] = (0, 1)            # (dim, groups in it)

    def __getattr__(self, attribute: str) -> Any:     # reached only where a slot is empty or a name unknown
        if attribute == "array":
            named = f'{self._kind()} "{self.name}"' if self.name else f"a {self._kind()}"
            raise GraphError(f"{named} of shape {self._shape} has no memory yet; call initialize() on the model first, "
                             "which names its parameters and gives them values")
        from mpitrain.ops.operators import unknown  # few names are wrong
        return unknown(self, attribute)

    @classmethod
    def _kind(cls) -> str:
        return cls.__name__.lower()

    @property
    def allocated(self) -> bool:
        try:
            object.__getattribute__(self, "array")        # the slot itself, without __getattr__
        except AttributeError:
            return False
        return True

    @property
    def master(self) -> Array:
        """The array of the values that are trained, saved and sent; `array` is what operations read."""
        return self.array

    @property
    def data(self) -> Array:
        return read_only(self.master)

    @property
    def shape(self) -> Shape:
        return self._shape

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        if self.allocated:
            return super().__repr__()
        return f'{type(self).__name__}("{self.name}", shape={self._shape}, no memory yet)'

    def narrow(self, axis: str, dim: int, start: int, stop: int, *, groups: int = 1) -> None:
        """Keeps only [start, stop) of `dim` (of each of its `groups`), this rank's part along an axis; before memory is given.

        One dim of a leaf may have groups, and is cut once then.
        """
        if self.allocated:
            raise GraphError(f'{self._kind()} "{self.name}" has memory already; cut it before initialize()')
        length, rest = divmod(self._shape[dim], groups)
        taken = self._groups[1] > 1 and (groups > 1 or dim == self._groups[0])
        if rest or taken or not 0 <= start <= stop <= length:
            of = f" of {groups} groups" if groups > 1 else ""
            raise ShapeError(f'{self._kind()} "{self.name}" of shape {self._shape} has no [{start}, {stop}){of} in dim {dim}')
        if groups > 1:
            self._groups = dim, groups
        self._shape = (*self._shape[:dim], groups * (stop - start), *self._shape[dim + 1:])
        self.offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1:])
        self.placement = {**self.placement, axis: dim}

    def resize(self, shape: Sequence[int]) -> None:
        """Another shape of the whole: that of a layer which has lost channels; before memory is given, and before cuts."""
        if self.allocated or self.placement:
            raise GraphError(f'{self._kind()} "{self.name}" has memory or is cut already; resize it before')
        self._shape = self.global_shape = tuple(shape)

    def boxes(self) -> list[Box]:
        """The slices of the whole that this part consists of: one, or one for each group."""
        dim, groups = self._groups
        if groups == 1:
            return [Box(tuple(slice(0, n) for n in self._shape), self.offset)]
        here, there = self._shape[dim] // groups, self.global_shape[dim] // groups
        found = []
        for g in range(groups):
            own = tuple(slice(g * here, (g + 1) * here) if d == dim else slice(0, n) for d, n in enumerate(self._shape))
            found.append(Box(own, (*self.offset[:dim], self.offset[dim] + g * there, *self.offset[dim + 1:])))
        return found

    def pieces(self, flat: Array, first: int) -> Iterator[tuple[Array, Shape]]:
        """(view, where it begins in the whole) of each box that `flat`, elements `first`, ... of this part, consists of."""
        at = 0
        for low, high in rectangles(self._shape, first, first + flat.size):
            shape = tuple(b - a for a, b in zip(low, high))
            block = flat[at:at + math.prod(shape)].reshape(shape)
            at += block.size
            for box in self.boxes():
                inside = [(max(a, s.start), min(b, s.stop)) for a, b, s in zip(low, high, box.own)]
                if all(a < b for a, b in inside):
                    yield (block[(*(slice(a - at_low, b - at_low) for (a, b), at_low in zip(inside, low)), ...)],
                           tuple(there + a - s.start for there, (a, _), s in zip(box.start, inside, box.own)))

    @property
    def key(self) -> str:
        """The name that the whole model has these values under."""
        return self.name

    def like(self, another: Another) -> Described:
        """A leaf of its own with this one's description, for a copy of its layer; `another` gives the copies of other leaves."""
        raise GraphError(f"{type(self).__name__}: a layer that has one cannot be copied; define like(another) in the class")

    def fill(self, seed: int, out: Array, start: int, xp: Any) -> None:
        """Writes the initial values of this part's elements start .. start+len(out) (C order) into `out`."""
        key = stream_key(seed, self.key)
        written = 0
        for first, count in runs(*self._ungrouped(), start, start + len(out)):
            for at in range(0, count, CHUNK):
                n = min(CHUNK, count - at)
                out[written:written + n] = self.init(key, first + at, n, self.global_shape, xp)
                written += n

    def _ungrouped(self) -> tuple[Shape, Shape, Shape]:
        """(offset, shape, shape of the whole) with a dim of its own for groups."""
        dim, groups = self._groups
        if groups == 1:
            return self.offset, self._shape, self.global_shape
        shape, whole = ((*s[:dim], groups, s[dim] // groups, *s[dim + 1:]) for s in (self._shape, self.global_shape))
        return (*self.offset[:dim], 0, *self.offset[dim:]), shape, whole


class Parameter(Described):
    """A trained leaf. ``decay=False``: never weight-decayed, whatever the optimizer is told.

    `operands`, "bfloat16" on the host or "tf32" on a device, lets matrix products with it round what they multiply; set by the
    storage of a model in that precision.
    `twin_of` is the name of another parameter whose values this one always has: see `Sequential.untie`.

    On a device `array` may be a copy in 16 bits, rounded from `master` after each change, whose gradient has the master's format.
    ``rounded=False``: never, as for the gains of norms, which are small and read in float32.

    Memory may come and go. Without `array`, `away` says why (default: it was never given any). Without `grad_buffer`, the first
    who asks for that is lent one by `lend`.
    """

    __slots__ = ("away", "decay", "home", "lend", "operands", "rounded", "trained_from", "twin_of", "unrounded")
    is_parameter = True

    def __init__(self, shape: Sequence[int], init: Initialiser, *, decay: bool = True, rounded: bool = True):
        super().__init__(shape, init)
        self.decay, self.rounded = decay, rounded
        self.unrounded: Array | None = None                   # the master, where `array` is a copy
        self.operands = ""
        self.twin_of = ""
        self.away = ""
        self.lend: Callable[[Parameter], Array] | None = None
        self.home: Callable[[], Any] | None = None            # its storage, by a weak reference
        self.trained_from = 0.0                               # the step from which a group of an optimizer trains it; inf: never
        self.requires_grad = True

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "grad_buffer" and self.lend is not None:
            self.grad_buffer = self.lend(self)
            return self.grad_buffer
        if attribute == "array" and self.away:
            raise GraphError(f'the parameter "{self.name}" is not in memory here: {self.away}')
        return super().__getattr__(attribute)

    @property
    def master(self) -> Array:
        return self.array if self.unrounded is None else self.unrounded

    def bind(self, values: Array, copy: Array | None = None) -> None:
        """Gives it memory: of its values, and of a copy of them in 16 bits, where operations are to read one."""
        self.array, self.unrounded = (values, None) if copy is None or not self.rounded else (copy, values)

    def round(self) -> None:
        """Makes the copy anew, after its values have changed."""
        if self.unrounded is not None:
            self.array[...] = self.unrounded

    @property
    def key(self) -> str:
        return self.twin_of or self.name

    def like(self, another: Another) -> Described:
        if type(self) is not Parameter:
            return super().like(another)
        return Parameter(self.global_shape, self.init, decay=self.decay, rounded=self.rounded)

    def twin(self, name: str) -> Parameter:
        """Another parameter with the values of this one, cut as it is, which the whole model calls `name`."""
        other = Parameter(self.global_shape, self.init, decay=self.decay, rounded=self.rounded)
        other._shape, other._groups = self._shape, self._groups
        other.offset, other.placement = self.offset, dict(self.placement)
        other.twin_of = self.twin_of or name
        other.trained_from, other.requires_grad = self.trained_from, self.requires_grad
        return other


class Buffer(Described):
    """State that is kept and saved with the model but not trained, for instance running statistics.

    `kind` is its dtype, where that is not the model's: "int8" of a weight in few bits. `floats` is the model's, once that has
    memory.
    """

    __slots__ = ("floats", "kind")

    def __init__(self, shape: Sequence[int], init: Initialiser, kind: str = ""):
        super().__init__(shape, init)
        self.kind, self.floats = kind, np.dtype(np.float32)

    def dtype_in(self, model: Any) -> Any:
        """Its dtype in a model whose floats have the dtype `model`."""
        return np.dtype(self.kind) if self.kind else model

    def like(self, another: Another) -> Described:
        return Buffer(self.global_shape, self.init, self.kind) if type(self) is Buffer else super().like(another)


Another = Callable[[Described], Described]
