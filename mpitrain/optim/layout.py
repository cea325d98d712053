"""What an optimizer sees of a model's memory: flat arrays, and where each parameter lives in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mpitrain.backend import Array

Allocate = Callable[[int], Any]
ALIGN = 16                                        # elements, as in `nn.storage`
StateShape = Callable[[tuple[int, ...]], tuple[int, ...]]     # the shape of a state, of the shape of its parameter


class Segment(Protocol):
    """The place of a parameter, or of a part that begins at its element `first`, in the flat arrays: elements [start, stop)."""

    @property
    def parameter(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def decay(self) -> bool: ...


class Storage(Protocol):
    """What an optimizer needs of a model's memory: see `nn.storage.FlatStorage`."""

    values: Array
    compute: Array | None                         # the parameters in 16 bits, which operations read; None: they read the values
    allocate: Allocate | None

    @property
    def segments(self) -> Sequence[Segment]: ...
    def new_flat(self, allocate: Allocate | None = None) -> Array: ...
    def memory(self, size: int, allocate: Allocate | None = None) -> Array: ...
    def attach_gradients(self) -> Array: ...
    def refresh(self, segments: Sequence[Any] | None = None) -> None: ...


class Condensed:
    """The layout of states in shapes of their own: where those of each whole parameter of a storage lie, in its order."""

    def __init__(self, storage: Storage, shape: StateShape):
        self.storage, self.segments = storage, list[Any]()
        self.places: dict[int, slice] = {}                    # by the parameter's start in the storage
        self.size = 0
        for s in storage.segments:
            stop = self.size + math.prod(shape(s.parameter.shape))
            self.segments.append(replace(s, start=self.size, stop=stop))        # type: ignore[type-var]
            self.places.setdefault(s.start, slice(self.size, stop))
            self.size = -(-stop // ALIGN) * ALIGN

    def new_flat(self, allocate: Allocate | None = None) -> Array:
        flat = self.storage.memory(self.size, allocate)
        flat.fill(0)
        return flat

    def views(self, flat: Array) -> list[Array]:
        return [flat[s.start:s.stop] for s in self.segments]
