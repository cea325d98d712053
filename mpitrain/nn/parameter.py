"""Parameter and Buffer: leaves that are described first (shape, initial values) and get memory later.

Describing a model costs nothing, so a model too large for this machine can be described, cut and inspected on it; a
rank then allocates what it keeps, and makes only those values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, stream_key
from mpitrain.errors import GraphError, ShapeError
from mpitrain.nn.init import Initialiser, Shape

CHUNK = 1 << 16            # elements made at a time: the random words of a large parameter would not fit beside it


class Described(Tensor):
    """A leaf whose shape is known before its memory exists; touching `array` before then raises GraphError.

    `name` is its path in the model. `placement` says which mesh axis it is cut along: {axis: dim}. `global_shape` is
    its shape before cutting and `offset` the place of this part's first element in it.
    """

    __slots__ = ("_shape", "global_shape", "init", "name", "offset", "placement")

    def __init__(self, shape: Sequence[int], init: Initialiser):
        super().__init__(np.empty(0, np.float32))
        del self.array                            # until somebody gives it memory
        self._shape: Shape = tuple(int(n) for n in shape)
        if any(n < 0 for n in self._shape):
            raise ShapeError(f"the shape of a {self._kind()} has no negative numbers, got {self._shape}")
        self.init = init
        self.name = ""
        self.placement: dict[str, int] = {}
        self.global_shape: Shape = self._shape
        self.offset: Shape = (0,) * len(self._shape)

    def __getattr__(self, attribute: str) -> Any:     # reached only where a slot is empty or a name unknown
        if attribute == "array":
            raise GraphError(f'{self._kind()} "{self.name}" of shape {self._shape} has no memory yet; '
                             "call initialize() on the model first")
        raise AttributeError(f"{type(self).__name__} has no attribute {attribute!r}")

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
    def shape(self) -> Shape:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        if self.allocated:
            return super().__repr__()
        return f'{type(self).__name__}("{self.name}", shape={self._shape}, no memory yet)'

    def narrow(self, axis: str, dim: int, start: int, stop: int) -> None:
        """Keeps only [start, stop) of `dim`, this rank's part along a mesh axis; before memory is given."""
        if self.allocated:
            raise GraphError(f'{self._kind()} "{self.name}" has memory already; cut it before initialize()')
        if not 0 <= start <= stop <= self._shape[dim]:
            raise ShapeError(f'{self._kind()} "{self.name}" of shape {self._shape} has no [{start}, {stop}) in dim {dim}')
        self._shape = (*self._shape[:dim], stop - start, *self._shape[dim + 1:])
        self.offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1:])
        self.placement = {**self.placement, axis: dim}

    def fill(self, seed: int, out: Array, start: int, xp: Any) -> None:
        """Writes the initial values of this part's elements start .. start+len(out) (C order) into `out`."""
        key = stream_key(seed, self.name)
        written = 0
        for first, count in _runs(self.offset, self._shape, self.global_shape, start, start + len(out)):
            for at in range(0, count, CHUNK):
                n = min(CHUNK, count - at)
                out[written:written + n] = self.init(key, first + at, n, self.global_shape, xp)
                written += n


def _runs(offset: Shape, shape: Shape, whole: Shape, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(first global element, count) of the contiguous pieces that elements start..stop of a part consist of.

    All dims after `inner` are whole, so a run is the product of the dims from there.
    """
    inner = max(0, len(shape) - 1)
    while inner > 0 and shape[inner] == whole[inner]:
        inner -= 1
    run = max(1, math.prod(shape[inner:]))
    strides = [math.prod(whole[d + 1:]) for d in range(len(whole))]
    while start < stop:
        count = min(stop, (start // run + 1) * run) - start
        index = np.unravel_index(start, shape) if shape else ()
        yield sum((int(i) + o) * s for i, o, s in zip(index, offset, strides)), count
        start += count


class Parameter(Described):
    """A trained leaf. ``decay=False``: never weight-decayed, whatever the optimizer is told.

    `operands` "bfloat16" lets matrix products with it round what they multiply; set by the storage of a model in that precision.
    """

    __slots__ = ("decay", "operands")
    is_parameter = True

    def __init__(self, shape: Sequence[int], init: Initialiser, *, decay: bool = True):
        super().__init__(shape, init)
        self.decay = decay
        self.operands = ""
        self.requires_grad = True


class Buffer(Described):
    """State that is kept and saved with the model but not trained, for instance running statistics."""

    __slots__ = ()
