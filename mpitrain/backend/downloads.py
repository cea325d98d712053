"""Small arrays of a device on their way to the host, which waits for them when it looks at them.

    read = downloads.begin(numbers, room=6)       the copy begins; read() waits for it
    later = downloads.with_next(losses)           no copy: losses are written into the room of the next one, if they fit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Read = Callable[[], "np.ndarray[Any, Any]"]


class Downloads:
    """The copies of a device whose array module is `xp`."""

    def __init__(self, xp: Any):
        self.xp = xp
        self._waiting: list[Waiting] = []
        self._flying: list[tuple[Any, Any]] = []              # The event behind each copy, and the memory that it writes to.

    def begin(self, array: Any, room: int | None = None) -> Read:
        """Begins to copy an array down, and returns what waits for it and gives it. `array`, of float64 and one dimension then,
        has room for others from its element `room` on: those that wait for a copy are written there, as far as there is room."""
        if self.xp is np:
            return lambda: array
        guests: list[tuple[Waiting, int]] = []
        while room is not None and self._waiting and room + self._waiting[0].array.size <= array.size:
            guest = self._waiting.pop(0)
            array[room:room + guest.array.size] = guest.array.reshape(-1)
            guests.append((guest, room))
            room += guest.array.size
        read = self._copied(array if room is None else array[:room])
        for guest, place in guests:
            guest.read = _part(read, place, guest.array)
        return read

    def with_next(self, array: Any) -> Waiting:
        """`array`, of float32 or float64, comes down with the next copy that has room, or by its own."""
        waiting = Waiting(self, array)
        self._waiting.append(waiting)
        return waiting

    def forget(self, waiting: Waiting) -> None:
        """One that waits no more."""
        self._waiting = [one for one in self._waiting if one is not waiting]

    def _copied(self, array: Any) -> Read:
        cuda = self.xp.cuda
        self._flying = [(event, memory) for event, memory in self._flying if not event.done]
        there = np.frombuffer(cuda.alloc_pinned_memory(max(array.nbytes, 1)), array.dtype, array.size).reshape(array.shape)
        array.get(out=there, blocking=False)
        here = cuda.Event(disable_timing=True)
        here.record()
        self._flying.append((here, there))    # Held until it has landed: memory that nobody holds goes to the next who asks.

        def read() -> np.ndarray[Any, Any]:
            here.synchronize()
            return there
        return read


class Waiting:
    """An array that comes down with another. Called, it waits for it and gives it."""

    def __init__(self, downloads: Downloads, array: Any):
        self.downloads, self.array = downloads, array
        self.read: Read | None = None

    def begin(self) -> Read:
        """Begins the copy, if it went along with none: to be called before anybody writes to the array."""
        if self.read is None:
            self.downloads.forget(self)
            self.read = self.downloads.begin(self.array)
        return self.read

    def __call__(self) -> np.ndarray[Any, Any]:
        return self.begin()()


def _part(read: Read, place: int, like: Any) -> Read:
    size, shape, dtype = like.size, like.shape, like.dtype
    return lambda: read()[place:place + size].reshape(shape).astype(dtype)
