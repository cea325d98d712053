"""Buckets added up by NCCL, from GPU to GPU, on a stream of its own while backward goes on.

MPI tells the ranks NCCL's identity and stays what they talk through in everything else. NCCL's order of addition is fixed for a
topology, an algorithm and a number of channels, and is not ours: bits are those of a repetition on the same machine, and
NCCL_ALGO and NCCL_PROTO fix them further. (Never run on GPUs so far: tests run it over a stand-in for NCCL.)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from mpitrain.backend import Array, Device
from mpitrain.backend.runtime import address
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.work import Collective
from mpitrain.errors import ConfigError
from mpitrain.placement.buckets import Bucket

SUM, FLOAT32, FLOAT64 = 0, 7, 8                               # of nccl.h


class NcclSum:
    """Every rank has the whole sum. ConfigError on all ranks where NCCL is missing, or two ranks have one GPU, with which NCCL
    hangs or fails."""

    tree = None

    def __init__(self, channel: Channel, device: Device):
        self.size, self._cuda = channel.size, device.xp.cuda
        nccl = nccl_of(device.xp)
        available = nccl is not None and bool(getattr(nccl, "available", True))
        gpus = channel.gather_objects([available, gpu_name(device)])
        missing = [rank for rank, (found, _) in enumerate(gpus) if not found]
        if missing:
            raise ConfigError(f'comm.library = "nccl", but rank {missing[0]} has no NCCL; pip install nvidia-nccl-cu12 (or '
                              '-cu13), or set comm.library = "mpi"')
        names = [name for _, name in gpus]
        twice = next((rank for rank, name in enumerate(names) if names.index(name) != rank), None)
        if twice is not None:
            raise ConfigError(f'comm.library = "nccl", but ranks {names.index(names[twice])} and {twice} have one GPU, '
                              f'{names[twice]}; start a rank for each GPU, or set comm.library = "mpi"')
        mine = base64.b64encode(bytes(byte % 256 for byte in nccl.get_unique_id())).decode() if channel.rank == 0 else ""
        told = tuple(base64.b64decode(channel.broadcast_object(mine)))
        self._nccl = nccl.NcclCommunicator(channel.size, tuple(byte - 256 if byte > 127 else byte for byte in told), channel.rank)
        self._stream = self._cuda.Stream(non_blocking=True)

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        if bucket.apart is not None:                          # Experts' gradients are summed over other ranks, by messages.
            apart: Collective = bucket.apart.prepare(arrays[0], bucket.name)
            return apart
        return NcclCollective(self._cuda, self._nccl, self._stream, arrays[0])


class NcclCollective:
    """The sum of one array over the ranks, in place."""

    def __init__(self, cuda: Any, nccl: Any, stream: Any, array: Array):
        self._cuda, self._nccl, self._stream, self._array = cuda, nccl, stream, array
        self._kind = FLOAT64 if array.dtype.name == "float64" else FLOAT32

    def start(self) -> NcclWork:
        written = self._cuda.Event()
        written.record()
        self._stream.wait_event(written)
        where = address(self._array)
        self._nccl.allReduce(where, where, self._array.size, self._kind, SUM, self._stream.ptr)
        landed = self._cuda.Event()
        landed.record(self._stream)
        return NcclWork(self._cuda, written, landed)

    def run(self) -> None:
        self.start().wait()


class NcclWork:
    """A sum on its way; what the device is asked for after `wait` begins once it is there, and the host goes on at once."""

    def __init__(self, cuda: Any, written: Any, landed: Any):
        self._cuda, self._landed, self.done = cuda, landed, False
        self.events = [written, written, landed]              # as those of values on the host

    def test(self) -> bool:
        self.done = self.done or bool(self._landed.done)
        return self.done

    def wait(self) -> None:
        self._cuda.get_current_stream().wait_event(self._landed)
        self.done = True


def nccl_of(xp: Any) -> Any:
    """CuPy's module of NCCL, which ``import cupy`` leaves out; None where there is none."""
    try:
        return getattr(xp.cuda, "nccl", None) or import_module(f"{xp.__name__}.cuda.nccl")
    except ImportError:
        return None


def gpu_name(device: Device) -> str:
    """The host and bus address of this rank's GPU."""
    import socket
    cuda = device.xp.cuda
    return f"{socket.gethostname()} {cuda.runtime.deviceGetPCIBusId(cuda.Device().id)}"
