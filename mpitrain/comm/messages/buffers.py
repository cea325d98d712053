"""Host memory that messages are sent from and received into: the one place that knows where an array lives.

MPI reads and writes host memory only here: Open MPI as PyPI ships it is not CUDA-aware, and handing a device pointer to an MPI
that is not crashes. A GPU array is staged through a pinned host buffer that the channel owns, on a stream of copies: the GPU goes
on computing, and the host does not wait before the messages need the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.wire import Format

if TYPE_CHECKING:
    from mpitrain.comm.messages.bus import Bounds, Crossing

Host: TypeAlias = np.ndarray[Any, Any]
LINE = 64                                                     # bytes of a cache line, which two ranks should not both write to


def own_memory(nbytes: int) -> Host:
    """`nbytes` bytes of this rank alone, zero at first, on a cache line."""
    block: Host = np.zeros(nbytes + LINE, np.uint8)
    return block[-block.ctypes.data % LINE:][:nbytes]


class Pool:
    """Byte buffers that are kept and reused: a fresh page costs 2 to 4 us per 4 KiB at its first touch on a virtual machine."""

    def __init__(self) -> None:
        self._free: list[Host] = []
        self.allocated = 0                                    # bytes, for tests and reports

    def take(self, nbytes: int) -> Host:
        """The smallest kept buffer of at least `nbytes`, else a new one; its contents are arbitrary."""
        fitting = [(buffer.nbytes, i) for i, buffer in enumerate(self._free) if buffer.nbytes >= nbytes]
        if fitting:
            return self._free.pop(min(fitting)[1])
        size = 1 << max(nbytes - 1, 63).bit_length()
        self.allocated += size
        return self.new(size)

    def give(self, buffer: Host) -> None:
        self._free.append(buffer)

    def new(self, size: int) -> Host:
        return np.empty(size, np.uint8)


class PinnedPool(Pool):
    """A pool of page-locked memory, which a GPU copies to and from several times faster, and the stream of these copies."""

    def __init__(self, xp: Any):
        super().__init__()
        self._xp = xp
        self.stream = xp.cuda.Stream(non_blocking=True)
        self._read: dict[int, Any] = {}                       # the event after which a buffer that was given back is free

    def new(self, size: int) -> Host:
        return np.frombuffer(self._xp.cuda.alloc_pinned_memory(size), np.uint8, size)

    def take(self, nbytes: int) -> Host:
        buffer = super().take(nbytes)
        read = self._read.pop(buffer.ctypes.data, None)
        if read is not None:
            read.synchronize()                                # Long over, unless the same buffer is taken at once.
        return buffer

    def give_after(self, buffer: Host, event: Any) -> None:
        """Gives a buffer back that the GPU reads until `event`."""
        self._read[buffer.ctypes.data] = event
        self.give(buffer)


class Pools:
    """The buffers of one channel, host and pinned apart."""

    def __init__(self) -> None:
        self.host = Pool()
        self._pinned: dict[str, PinnedPool] = {}

    def staging(self, xp: Any) -> PinnedPool:
        """The pool that stages arrays of `xp`."""
        if xp.__name__ not in self._pinned:
            self._pinned[xp.__name__] = PinnedPool(xp)
        return self._pinned[xp.__name__]


def assert_usable(array: Array) -> None:
    """AssertionError for an array with gaps, and for one on the host that is read-only."""
    assert array.flags.c_contiguous, f"a collective needs a contiguous array, not strides {array.strides} of {array.shape}"
    assert array_module(array) is not np or array.flags.writeable, \
        "a collective writes its result into the array, which is read-only"


class Values(Protocol):
    """The values of an array on the host, for as long as messages read and write them, and packed values beside them or None.

    They are there once `ready()`, which does not wait, says so, or `wait()` has returned. `events` are a device's: it had written
    them, they were here, and, once closed, they were back.
    """

    @property
    def host(self) -> Host: ...
    @property
    def packed(self) -> Host | None: ...
    @property
    def events(self) -> list[Any]: ...

    def ready(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Staged:
    """`array` as a flat host array `host`, for as long as messages read and write it; `close` brings the values back.

    A host array is used in place: it must be contiguous and writable, because a hidden copy would receive the sum and lose it.
    Values of a device are on their way here until `ready()`, which does not wait, or `wait()`, which does; and after `close` on
    their way back: what the device is asked for next begins after they have arrived.
    """

    packed: Host | None = None

    def __init__(self, array: Array, pools: Pools):
        assert_usable(array)
        self._array, self._here = array, None
        self.events: list[Any] = []
        self._pool: PinnedPool | None = None
        xp = array_module(array)
        if xp is np:
            self.host: Host = array.reshape(-1)
            return
        self._pool = pools.staging(xp)
        self._staging = self._pool.take(array.nbytes)
        self.host = self._staging[:array.nbytes].view(array.dtype)
        cuda, stream = xp.cuda, self._pool.stream
        final = cuda.Event()
        final.record()                                        # of the current stream, which has written the values
        stream.wait_event(final)
        array.reshape(-1).get(stream=stream, out=self.host, blocking=False)
        self._here = cuda.Event()
        self._here.record(stream)
        self.events = [final, self._here]

    def ready(self) -> bool:
        return self._here is None or bool(self._here.done)

    def wait(self) -> None:
        if self._here is not None:
            self._here.synchronize()

    def close(self) -> None:
        """Copy the values back into the array, and give the staging buffer back."""
        if self._pool is None:
            return
        cuda, stream = array_module(self._array).cuda, self._pool.stream
        self._array.reshape(-1).set(self.host, stream=stream)
        back = cuda.Event()
        back.record(stream)
        cuda.get_current_stream().wait_event(back)
        self.events.append(back)
        self._pool.give_after(self._staging, back)
        self._pool = None


class PackedByDevice:
    """A float32 array of a device, for messages of 16 bits: what `crossing` says comes down packed, into `packed`, or as it is,
    into `host`, and goes up from there. As with `Staged`, nothing waits before the messages need the values.

    The kernels that pack and unpack run on the stream of copies, beside what the device computes.
    """

    def __init__(self, array: Array, pools: Pools, packing: Format, crossing: Crossing):
        from mpitrain.kernels.device.wire import format_of
        assert_usable(array)
        self._array, self._crossing, self._format = array.reshape(-1), crossing, format_of(packing.name)
        xp = array_module(array)
        self._pool, self._cuda, n = pools.staging(xp), xp.cuda, array.size
        self._staging = self._pool.take(6 * n)
        self.host: Host = self._staging[:4 * n].view(np.float32)
        self.packed: Host = self._staging[4 * n:6 * n].view(np.uint16)
        self._on_device = xp.empty(n, np.uint16)              # Memory of the current stream, which waits for ours in the end.
        final = self._cuda.Event()
        final.record()                                        # of the current stream, which has written the values
        self._pool.stream.wait_event(final)
        with self._pool.stream:
            if crossing.packed:
                self._format.pack(self._array, self._on_device)
            self._down(self._on_device, self.packed, crossing.packed)
            self._down(self._array, self.host, crossing.wide)
        self._here = self._cuda.Event()
        self._here.record(self._pool.stream)
        self.events = [final, self._here]

    def _down(self, array: Array, to: Host, parts: Iterable[Bounds]) -> None:
        for start, stop in parts:
            array[start:stop].get(stream=self._pool.stream, out=to[start:stop], blocking=False)

    def ready(self) -> bool:
        return bool(self._here.done)

    def wait(self) -> None:
        self._here.synchronize()

    def close(self) -> None:
        """Send the results up, and give the staging buffer back."""
        packed, stream = self._crossing.up_packed, self._pool.stream
        array, values = (self._on_device, self.packed) if packed else (self._array, self.host)
        with stream:
            for start, stop in self._crossing.up:
                array[start:stop].set(values[start:stop], stream=stream)
                if packed:
                    self._format.unpack(array[start:stop], self._array[start:stop])
        back = self._cuda.Event()
        back.record(stream)
        self._cuda.get_current_stream().wait_event(back)
        self.events.append(back)
        self._pool.give_after(self._staging, back)


class Widened:
    """A 16-bit array as float32 values `host`, in which it is summed; `close` rounds them back.

    `packing` says what the 16 bits mean: a bfloat16 array is stored as uint16.
    """

    packed: Host | None = None

    def __init__(self, array: Array, pools: Pools, packing: Format):
        self._staged, self._packing, self._pool = Staged(array, pools), packing, pools.host
        self.events = self._staged.events
        self._staged.wait()
        self._packed = self._staged.host.view(np.uint16)
        self._memory = self._pool.take(4 * self._packed.size)
        self.host: Host = self._memory[:4 * self._packed.size].view(np.float32)
        packing.unpack(self._packed, self.host)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """The values are here since this was made."""

    def close(self) -> None:
        self._packing.pack(self.host, self._packed)
        self._staged.close()
        self._pool.give(self._memory)
