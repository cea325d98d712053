"""Buckets added up in the memory of the GPU that all ranks share: each reads and writes the others' arenas there (CUDA IPC).

    rank 0's arena   | part 0 | part 1 | part 2 |      rank r's kernel reads part r of all arenas, adds the ranks in the order
    rank 1's arena   | part 0 | part 1 | part 2 |      of the fixed binary tree, and writes the sum to part r of all arenas
    rank 2's arena   | part 0 | part 1 | part 2 |

No event or stream is shared: ranks tell each other by messages of a byte what their own device has done. In the order of a work,

    1. this rank's backward has written its bucket: its event is there, and it tells the others;
    2. all others have told so: it launches its kernel;
    3. its kernel's event is there: it tells the others;
    4. all others have told so: the sum is here, and the bucket is this rank's alone again.

Why that is right. Kernels read what was written: each is launched after 2, when backward has ended on every rank; what an ended
kernel has written lies in the memory that all share. Kernels do not disturb each other: an element is read and written by the
one kernel that has its part, in one thread, which reads all ranks before it writes. Nobody writes a bucket while it is read, or
uses it too early: the work is done after 4, when every rank's kernel has ended, and until then the bucket belongs to the work, as
with any collective. Ranks do not wait for each other in a circle: what a rank tells depends on its device and on what it was
told, never on the work that it waits for just then, since each wait moves all that is in flight. A rank that dies or stands still
is found as in any other work (`PolledWork`).

The bits are those of comm.algorithm = "direct" by messages. (Never run on a GPU so far: tests run it over a stand-in, in which
processes do share the memory.)
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import Array, Device
from mpitrain.backend.runtime import address
from mpitrain.comm.job.together import everywhere
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.interpreter import HeadedWork, Start
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.comm.messages.signature import Signature
from mpitrain.comm.work import Collective
from mpitrain.errors import ConfigError
from mpitrain.kernels.device.shared_sum import MOST, sum_of_ranks
from mpitrain.parallel.gradients.nccl_sum import gpu_name
from mpitrain.placement.buckets import Bucket

PEER_ACCESS = 1                # cudaIpcMemLazyEnablePeerAccess, the only flag there is
BLOCK = 2 << 20                # bytes: of smaller allocations the driver makes parts of one, which a handle opens as a whole
LINE = 128                     # elements: parts begin at multiples, so that two ranks do not write one line of the device's cache

Steps: TypeAlias = tuple[tuple[Callable[[], bool], Callable[[], None]], ...]


class IpcSum:
    """Every rank has the whole sum. ConfigError on all ranks where they are on different GPUs, or are more than MOST.

    The arena that is summed must be of `allocate`.
    """

    tree = None

    def __init__(self, channel: Channel, device: Device):
        self.channel, self.size, self._device = channel, channel.size, device
        gpus = channel.gather_objects(gpu_name(device))
        other = next((rank for rank, gpu in enumerate(gpus) if gpu != gpus[0]), None)
        if other is not None:
            raise ConfigError(f'comm.library = "ipc" is for ranks that share a GPU, but rank 0 has {gpus[0]} and rank {other} '
                              f'{gpus[other]}; set comm.library = "nccl" or "mpi"')
        if channel.size > MOST:
            raise ConfigError(f'comm.library = "ipc" adds up {MOST} ranks at most, found {channel.size}; start fewer ranks, or '
                              'set comm.library = "mpi"')
        self.stream = device.xp.cuda.Stream(non_blocking=True)        # not behind what backward has asked for meanwhile
        self._memory: Array = None
        self._addresses: list[int] = []                               # of each rank's arena, as this process sees it

    def allocate(self, nbytes: int) -> Array:
        """Device memory that the other ranks see too; collective. ConfigError on all ranks where one cannot open another's."""
        xp = self._device.xp
        with xp.cuda.using_allocator(None):                   # An allocation of its own: CuPy's pool cuts larger ones in pieces,
            self._memory = xp.empty(-(-nbytes // BLOCK) * BLOCK, "uint8")          # and a handle is of the whole.
        runtime, own = xp.cuda.runtime, address(self._memory)
        handles = everywhere(self.channel, lambda: [nbytes, _text(_cuda(partial(runtime.ipcGetMemHandle, own)))])
        assert all(size == nbytes for size, _ in handles), f"ranks have arenas of different sizes: {handles}"
        self._addresses = [own] * self.size

        def open_all() -> None:
            for rank, (_, handle) in enumerate(handles):
                if rank != self.channel.rank:
                    opened = int(_cuda(partial(runtime.ipcOpenMemHandle, base64.b64decode(handle), PEER_ACCESS)))
                    weakref.finalize(self, runtime.ipcCloseMemHandle, opened)
                    self._addresses[rank] = opened
        everywhere(self.channel, open_all)
        return self._memory

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        if bucket.apart is not None:                          # Experts' gradients are summed over other ranks, by messages.
            apart: Collective = bucket.apart.prepare(arrays[0], bucket.name)
            return apart
        array = arrays[0].reshape(-1)
        offset = address(array) - address(self._memory)
        assert 0 <= offset <= self._memory.nbytes - array.nbytes, "a bucket lies outside of the arena that ranks share"
        size = -(-array.size // (self.size * LINE)) * LINE
        low, high = (min(rank * size, array.size) for rank in (self.channel.rank, self.channel.rank + 1))
        places = [base + offset + low * array.itemsize for base in self._addresses]
        launch = partial(sum_of_ranks, array[low:high], self.channel.rank, places)
        signature = Signature.of(f"sum on one GPU at byte {offset} of", bucket.name, array.dtype.name, array.size)
        return Prepared(partial(self._start, signature, launch))

    def _start(self, signature: Signature, launch: Callable[[], None]) -> IpcWork:
        start, tag = self.channel.start_of(signature)
        return self.channel.progress.added(IpcWork(start, tag, self, self._device.xp.cuda, launch))


class IpcWork(HeadedWork):
    """The sum of a bucket on its way, in the four steps above, each as (what it waits for, what is done then)."""

    def __init__(self, start: Start, tag: int, owner: IpcSum, cuda: Any, launch: Callable[[], None]):
        self._owner, self._cuda, self._launch, self._tag = owner, cuda, launch, tag       # the owner's memory stays open
        self._step, self._event = 0, cuda.Event(disable_timing=True)
        self._event.record()                                  # of the current stream, on which backward writes
        self._steps: Steps = ((self._reached, self._tell), (self._told, self._add_up), (self._reached, self._tell),
                              (self._told, self._end))
        super().__init__(start)
        self._others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._byte, self._inbox = np.zeros(1, np.uint8), np.empty((2, len(self._others), 1), np.uint8)
        self._sends: list[Any] = []
        self._guarded(self._listen)

    def _listen(self) -> None:
        """Receives for both times that each rank tells; messages of one rank come in the order in which they are sent."""
        self._receives = [[self._comm.Irecv(place, rank, self._tag) for place, rank in zip(places, self._others)]
                          for places in self._inbox]

    def _peers(self) -> tuple[int, ...]:
        waits_for_ranks = self._step < len(self._steps) and self._steps[self._step][0] == self._told
        return super()._peers() or (tuple(self._others) if waits_for_ranks else ())

    def _advance(self) -> bool:
        while self._step < len(self._steps):
            reached, then = self._steps[self._step]
            if not reached():
                return False
            self._step += 1
            then()
        return self.done

    def _reached(self) -> bool:
        return bool(self._event.done)

    def _tell(self) -> None:
        self._sends += [self._comm.Isend(self._byte, rank, self._tag) for rank in self._others]

    def _told(self) -> bool:
        return self._same() and bool(self._mpi.Request.Testall(self._receives[self._step // 2]))

    def _add_up(self) -> None:
        with self._owner.stream:
            self._launch()
            self._event = self._cuda.Event(disable_timing=True)
            self._event.record(self._owner.stream)

    def _end(self) -> None:
        self._mpi.Request.Waitall(self._sends)                # the others have told after they had heard, or MPI has the bytes
        self._steps = ()                                      # They hold this work: it would live until a collection.
        self._land()


def _text(handle: bytes) -> str:
    return base64.b64encode(bytes(handle)).decode()


def _cuda(action: Callable[[], Any]) -> Any:
    """What CUDA answers. ConfigError with its words: between containers, or users, processes may not see each other's memory."""
    try:
        return action()
    except RuntimeError as error:
        raise ConfigError(f'comm.library = "ipc", but CUDA cannot share memory between these ranks: {error}; set comm.library = '
                          '"mpi"') from error
