"""Optimizer state and update on the host, for parameters that live on a GPU (Ren et al.: "ZeRO-Offload", 2021).

    GPU      parameters   gradients                       parameters
                              | down                          ^ up
    host                  gradients -> optimizer, m, v -> parameters

The host has a copy of the parameters, so a step moves gradients down and parameters up, in pieces of neighbouring parameters:

    down     piece 0 | piece 1 | piece 2 |
    host               update 0 | update 1 | update 2
    up                            piece 0  | piece 1  | piece 2

Parameters that somebody else has changed since (a checkpoint that was read, a broadcast) come down first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.kernels.optimizer import FACTOR, FOUND, LEFT_OUT
from mpitrain.optim.layout import Allocate, Segment
from mpitrain.optim.optimizer import Held, Optimizer
from mpitrain.optim.places import memory_of, place_in

PIECE = 32 << 20             # bytes: at 50 GB/s a piece takes 0.7 ms, against which the start of a copy is nothing


class Copies:
    """Copies between arrays of the device of `xp` and pinned memory of the host, beside what the device computes.

    Between `begin` and `end`; what the device has been asked for before `begin` is done before the copies, and what it is asked
    for after `end` after them. The tests' stand-in for a GPU has no streams: each copy is done when it is asked for.
    """

    def __init__(self, xp: Any):
        self._cuda = getattr(xp, "cuda", None)
        self._xp = xp
        if self._cuda is not None:
            self._down, self._up = self._cuda.Stream(non_blocking=True), self._cuda.Stream(non_blocking=True)

    def memory(self, size: int, dtype: Any) -> Array:
        """Host memory that copies are fast from and to, zero."""
        if self._cuda is None or not size:
            return np.zeros(size, dtype)
        nbytes = size * np.dtype(dtype).itemsize
        flat: Array = np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes).view(dtype)
        flat.fill(0)
        return flat

    def begin(self) -> None:
        if self._cuda is not None:
            self._up.synchronize()                        # Nothing leaves the host's memory any more, which is written to next.
            asked = self._cuda.get_current_stream().record()
            self._down.wait_event(asked)
            self._up.wait_event(asked)

    def down(self, source: Array, to: Array) -> Callable[[], None]:
        """Begins a copy to the host; the result waits until it is there."""
        if self._cuda is None:
            to[...] = asnumpy(source)
            return lambda: None
        source.get(stream=self._down, out=to, blocking=False)
        done: Callable[[], None] = self._down.record().synchronize
        return done

    def up(self, source: Array, to: Array) -> None:
        """Begins a copy to the device."""
        if self._cuda is None:
            to[...] = self._xp.asarray(source)
        else:
            to.set(source, stream=self._up)

    def end(self) -> None:
        if self._cuda is not None:
            self._cuda.get_current_stream().wait_event(self._up.record())


class HostStorage:
    """What an optimizer needs of a model's memory (`optimizer.Storage`), on the host, for a storage on a device.

    `values` is a copy of the device's; places and names are the storage's own. `allocate` supplies memory for state.
    """

    def __init__(self, storage: Any, copies: Copies, allocate: Allocate | None = None):
        self.device_storage, self.allocate, self.segments = storage, allocate, storage.segments
        self.dtype = np.dtype(str(storage.values.dtype))
        self.values: Array = copies.memory(storage.values.shape[0], self.dtype)
        self.views, self.compute = storage.views, None
        self.attach_gradients = storage.attach_gradients      # An optimizer's `step` is not for state on the host, `update` is.

    def refresh(self, segments: Sequence[Segment] | None = None) -> None:
        """Nothing: the copies in 16 bits are the device's."""

    def memory(self, size: int, allocate: Allocate | None = None) -> Array:
        """A host array of so many elements; its content is undefined."""
        nbytes = size * self.dtype.itemsize
        if allocate is None or not nbytes:
            return np.empty(size, self.dtype)
        flat: Array = np.frombuffer(allocate(nbytes), np.uint8)[:nbytes].view(self.dtype)
        return flat

    def new_flat(self, allocate: Allocate | None = None) -> Array:
        """A host array of the storage's layout, zero."""
        if allocate is None or not self.values.size:
            return np.zeros_like(self.values)
        flat: Array = np.frombuffer(allocate(self.values.nbytes), np.uint8)[:self.values.nbytes].view(self.dtype)
        flat.fill(0)
        return flat


class OnHost(Optimizer):
    """The optimizer that `make` makes of a storage, with state and update on the host and parameters where they are.

    `state` and `storage` are the host's. For whoever brings the gradients (`update`), not for plain loops.
    """

    def __init__(self, make: Callable[[Any], Optimizer], storage: Any, allocate: Allocate | None = None):
        self._copies = Copies(array_module(memory_of(storage.values)))
        host = HostStorage(storage, self._copies, allocate)
        self.inner, self.device_storage, self.host = make(host), storage, host
        vars(self).update({name: value for name, value in vars(self.inner).items() if name not in vars(self)})
        self.whole_parameters = self.inner.whole_parameters
        self._gradients = self._copies.memory(host.values.size, host.dtype)
        self._seen: list[int] | None = None               # The copy was made when parameters had been changed so often.

    def held(self) -> list[Held]:
        return self.inner.held()

    def averaged_weights(self, segments: Sequence[Segment] | None = None) -> Iterator[tuple[Segment, Array]]:
        return self.inner.averaged_weights(segments)

    @property
    def nbytes(self) -> int:
        """Of the state, and of the copies of parameters and gradients that go with it."""
        return self.inner.nbytes + int(self.host.values.nbytes + self._gradients.nbytes)

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        left_out = 0
        if numbers is not None:                           # The host, which updates, has to wait for them.
            found = asnumpy(numbers)
            if found[FOUND]:
                self.steps = step
                return
            scale *= float(found[FACTOR])
            left_out = int(found[LEFT_OUT])
        chosen = self.host.segments if segments is None else segments
        values, copies, host = self.device_storage.values, self._copies, self.host
        copies.begin()
        self._refresh()
        pieces = self._pieces(chosen, gradients)
        coming = [copies.down(gradients[a:b], self._gradients[a:b]) for a, b, _ in pieces]
        for (a, b, parts), wait in zip(pieces, coming, strict=True):
            wait()
            self.inner.update(self._gradients, lr=lr, step=max(1, step - left_out), scale=scale, segments=parts)
            copies.up(host.values[a:b], values[a:b])
        copies.end()
        if self.device_copy is not None:
            self._write_copy(pieces)
        self.inner.steps = self.steps = step
        self._seen = self._changes()

    @property
    def device_copy(self) -> Array | None:
        """The copy of the parameters in 16 bits that the device computes with."""
        found: Array | None = getattr(self.device_storage, "compute", None)
        return found

    def _write_copy(self, pieces: Sequence[tuple[int, int, Any]]) -> None:
        values, copy = self.device_storage.values, self.device_copy
        assert copy is not None
        for a, b, _ in pieces:
            place = place_in(values, a)
            copy[place:place + b - a] = values[a:b].astype(copy.dtype)

    def _pieces(self, segments: Sequence[Segment], gradients: Any) -> list[tuple[int, int, list[Segment]]]:
        """Elements [a, b) and their segments: neighbours, with the zeros between them, up to the size of a piece."""
        pieces: list[tuple[int, int, list[Segment]]] = []
        most = PIECE // self.host.dtype.itemsize
        for s in segments:
            if s.stop == s.start:
                continue
            if pieces:
                a, b, parts = pieces[-1]
                near = self._follows.get(b) == s.start and s.stop - a <= most
                if near and all(place_in(flat, s.start) - place_in(flat, a) == s.start - a
                                for flat in (self.device_storage.values, gradients)):
                    pieces[-1] = (a, s.stop, [*parts, s])
                    continue
            pieces.append((s.start, s.stop, [s]))
        return pieces

    def restart(self) -> None:
        self.inner.restart()
        self.steps = 0

    def _refresh(self) -> None:
        if self._seen == self._changes():
            return
        values = self.device_storage.values
        for wait in [self._copies.down(values[a:b], self.host.values[a:b])
                     for a, b, _ in self._pieces(self.host.segments, values)]:
            wait()

    def _changes(self) -> list[int]:
        return [s.parameter.shared_version().count for s in self.host.segments]
