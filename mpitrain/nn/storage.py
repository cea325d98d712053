"""One flat array for all parameters of a model, and the table that says where each lives in it.

    values  [ embed.weight ....... |pad| block0.weight ... |pad| block0.bias .|pad| ... ]
              ^ start       ^ stop

Gradients and optimizer state use the same layout, so reduction, norm and update are loops over flat slices. So does `compute`,
the copy of float32 values in 16 bits that operations read where a device computes in those. Each parameter begins on a multiple
of 16 elements: 64 bytes in float32, and the same table in float64. What lies between is zero.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from mpitrain.backend import CPU, Array, Device, compute_dtype, float_dtype, is_array
from mpitrain.backend.dtype import product_format
from mpitrain.errors import ShapeError
from mpitrain.nn.parameter import Parameter

__all__ = ["FlatLayout", "FlatStorage", "Segment", "plan_segments"]

ALIGN = 16                 # elements
LINE = 64                  # bytes: a cache line, and the widest vector load

Allocate = Callable[[int], Any]


@dataclass(frozen=True)
class Segment:
    """One parameter's elements [start, stop) of every flat array; `decay` is False where weight decay leaves it alone."""

    parameter: Parameter
    name: str
    start: int
    stop: int
    decay: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def first(self) -> int:
        """The number of the parameter's element that this segment begins with."""
        return 0


def plan_segments(parameters: Sequence[Parameter]) -> tuple[list[Segment], int]:
    """(where each parameter will live, the length of a flat array), from shapes alone."""
    segments, end = [], 0
    for p in parameters:
        segments.append(Segment(p, p.name, end, end + p.size, p.decay))
        end = -(-(end + p.size) // ALIGN) * ALIGN
    return segments, end


class FlatLayout:
    """Where each parameter (in this order) lives in flat arrays of one dtype, and the making of such arrays.

    `allocate(nbytes)` supplies memory, 64-byte aligned: anything with the buffer protocol, or a uint8 array of the device; by
    default the device's own memory.
    """

    def __init__(self, parameters: Sequence[Parameter], dtype: str = "float32", device: Device = CPU,
                 allocate: Allocate | None = None):
        self.precision, self.dtype, self.device, self.allocate = dtype, float_dtype(dtype), device, allocate
        self.compute_dtype = compute_dtype(dtype, device)         # of activations, and of copies of parameters if it has 16 bits
        self.segments, self.size = plan_segments(parameters)
        for segment in self.segments:
            segment.parameter.operands = product_format(dtype, device.xp is not np)

    @property
    def is_mixed(self) -> bool:
        """Whether operations read copies of the parameters in fewer bits than the values have."""
        return self.compute_dtype != self.dtype

    def views(self, flat: Array) -> list[Array]:
        """The parameters' parts of a flat array of this layout, in their shapes."""
        if flat.shape != (self.size,):
            raise ShapeError(f"a flat array of this model has shape ({self.size},), this one {flat.shape}")
        return [flat[s.start:s.stop].reshape(s.shape) for s in self.segments]

    def new_flat(self, allocate: Allocate | None = None) -> Array:
        """Another flat array of this layout, zero: gradients, optimizer state. In the host's own memory, what is never written
        takes none."""
        if allocate is None and self.device.xp is np:
            return self.memory(self.size, partial(_host_memory, np.zeros))
        flat = self.memory(self.size, allocate)
        flat.fill(0)
        return flat

    def memory(self, size: int, allocate: Allocate | None = None) -> Array:
        """A flat array of `size` elements in memory from `allocate`; its content is undefined."""
        nbytes = size * self.dtype.itemsize
        if nbytes == 0:
            return self.device.xp.empty(0, self.dtype)
        raw = (allocate or self._device_memory)(nbytes)
        if not is_array(raw):
            raw = np.frombuffer(raw, dtype=np.uint8)
        if raw.nbytes < nbytes:
            raise ShapeError(f"the parameters need {nbytes} bytes, allocate() gave {raw.nbytes}")
        if self.device.xp is np and raw.ctypes.data % LINE:
            raise ShapeError(f"allocate() gave memory at an address that is not a multiple of {LINE} bytes")
        return raw[:nbytes].view(self.dtype)

    def _device_memory(self, nbytes: int) -> Array:
        if self.device.xp is not np:
            return self.device.xp.empty(nbytes, "uint8")          # a device's allocator aligns to 256 bytes or more
        return _host_memory(np.empty, nbytes)


def _host_memory(make: Callable[..., Array], nbytes: int) -> Array:
    """Bytes that begin on a cache line, out of an array that `make` gives."""
    raw = make(nbytes + LINE, np.uint8)
    shift = -raw.ctypes.data % LINE
    return raw[shift:shift + nbytes]


class FlatStorage(FlatLayout):
    """Memory for parameters: `values` holds all, each `parameter.master` is a view into it; `compute`, where there is one, the
    copies in 16 bits that are each `parameter.array`, but for parameters that are not `rounded`.

    Whoever writes values calls `refresh` before somebody computes. The memory is not cleared here, since several ranks may share
    it: `initialise` writes every element.
    """

    def __init__(self, parameters: Sequence[Parameter], dtype: str = "float32", device: Device = CPU,
                 allocate: Allocate | None = None):
        super().__init__(parameters, dtype, device, allocate)
        self.values = self.memory(self.size, allocate)
        self.compute: Array | None = device.xp.empty(self.size, self.compute_dtype) if self.is_mixed else None
        copies = [None] * len(self.segments) if self.compute is None else self.views(self.compute)
        for segment, view, copied in zip(self.segments, self.views(self.values), copies):
            segment.parameter.bind(view, copied)
            segment.parameter.home = ref(self)
        self.gradients: Array | None = None
        self._gradient_views: list[Array] = []

    def attach_gradients(self) -> Array:
        """Makes the arena `gradients`, and backward write there; for plain loops (a trainer brings its own buckets)."""
        if self.gradients is None:
            self.gradients = self.new_flat()
            self._gradient_views = self.views(self.gradients)
        for segment, view in zip(self.segments, self._gradient_views):
            segment.parameter.grad_buffer = view
        return self.gradients

    def initialise(self, seed: int) -> None:
        """Writes the initial values, and zeros between parameters."""
        ends = [s.start for s in self.segments[1:]] + [self.size]
        for segment, end in zip(self.segments, ends):
            segment.parameter.fill(seed, self.values[segment.start:segment.stop], 0, self.device.xp)
            self.values[segment.stop:end] = 0
            segment.parameter.mark_changed()
        self.refresh()

    def refresh(self, segments: Sequence[Any] | None = None) -> None:
        """Rounds the values of `segments` (default: of all) to the copies in 16 bits, if there are any."""
        if self.compute is not None:
            for start, stop in [(0, self.size)] if segments is None else runs_of(segments):
                self.compute[start:stop] = self.values[start:stop]

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatStorage:
        """A copy in memory of its own, to which the copied parameters are bound (a plain deepcopy would part them)."""
        parameters = [copy.deepcopy(s.parameter, memo) for s in self.segments]
        twin = memo[id(self)] = FlatStorage(parameters, self.precision, self.device)
        twin.values[...] = self.values
        twin.refresh()
        return twin

    def __repr__(self) -> str:
        count = sum(math.prod(s.shape) for s in self.segments)
        return f"FlatStorage({len(self.segments)} parameters, {count} values, {self.precision}, {self.device.name})"


def runs_of(segments: Sequence[Any]) -> list[tuple[int, int]]:
    """The elements of segments in order, as few [start, stop): with the zeros between neighbours."""
    found: list[tuple[int, int]] = []
    for s in segments:
        if found and 0 <= s.start - found[-1][1] < ALIGN:
            found[-1] = found[-1][0], s.stop
        else:
            found.append((s.start, s.stop))
    return found


def check_state(own: dict[str, tuple[int, ...]], state: dict[str, Any], what: str) -> None:
    """Raises ShapeError naming every missing, unexpected and reshaped entry of `state`."""
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    reshaped = [f"{name} is {tuple(state[name].shape)}, expected {shape}" for name, shape in own.items()
                if name in state and tuple(state[name].shape) != shape]
    problems = [f"{word}: {', '.join(names)}" for word, names in
                (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped)) if names]
    if problems:
        raise ShapeError(f"the state does not fit {what}; {'; '.join(problems)}")
