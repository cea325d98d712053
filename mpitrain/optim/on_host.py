"""Optimizer state and update on the host, for parameters that live on a GPU (Ren et al.: "ZeRO-Offload", 2021).

    GPU      parameters   gradients                       parameters
                              | down                          ^ up
    host                  gradients -> optimizer, m, v -> parameters

The host has a copy of the parameters, so a step moves gradients down and parameters up. Parameters that somebody else has changed
since (a checkpoint that was read, a broadcast) come down first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, asnumpy, overwrite
from mpitrain.optim.optimizer import Allocate, Held, Optimizer, Segment


class HostStorage:
    """What an optimizer needs of a model's memory (`optimizer.Storage`), on the host, for a storage on a device.

    `values` is a copy of the device's; places and names are the storage's own. `allocate` supplies memory for state.
    """

    def __init__(self, storage: Any, allocate: Allocate | None = None):
        self.device_storage, self.allocate, self.segments = storage, allocate, storage.segments
        self.dtype = np.dtype(str(storage.values.dtype))
        self.values: Array = np.zeros(storage.values.shape, self.dtype)
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
        host = HostStorage(storage, allocate)
        self.inner, self.device_storage, self.host = make(host), storage, host
        vars(self).update({name: value for name, value in vars(self.inner).items() if name not in vars(self)})
        self.whole_parameters = self.inner.whole_parameters
        self._gradients = np.zeros_like(host.values)
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
               segments: Sequence[Segment] | None = None) -> None:
        chosen = self.host.segments if segments is None else segments
        self._refresh()
        for s in chosen:
            self._gradients[s.start:s.stop] = asnumpy(gradients[s.start:s.stop])
        self.inner.update(self._gradients, lr=lr, step=step, scale=scale, segments=segments)
        for s in chosen:
            overwrite(self.device_storage.values[s.start:s.stop], self.host.values[s.start:s.stop])
        self.device_storage.refresh(segments)
        self.steps, self._seen = step, self._changes()

    def restart(self) -> None:
        self.inner.restart()
        self.steps = 0

    def _refresh(self) -> None:
        if self._seen == self._changes():
            return
        for s in self.host.segments:
            self.host.values[s.start:s.stop] = asnumpy(self.device_storage.values[s.start:s.stop])

    def _changes(self) -> list[int]:
        return [s.parameter.shared_version().count for s in self.host.segments]
