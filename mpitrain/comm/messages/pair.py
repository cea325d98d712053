"""All-reduce of a small array between two ranks: one message each way that holds signature and data together.

    [ sequence number, checksum, text: 128 bytes | data: at most 64 KiB ]

Such a message takes the place of a collective's header and has its tag, so a rank that runs anything else is found out as ever.
Blocking calls run in C where they can; all others are `PairWork`s. Both send the same bytes and end with the same bits, so ranks
may differ in that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import native
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.interpreter import HEADER_TAG, PAIR_BYTES, HeadedWork, Start, check_header
from mpitrain.comm.messages.lost_peer import lost_peer
from mpitrain.comm.messages.progress import InFlight
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature

if TYPE_CHECKING:
    from mpi4py import MPI

KINDS = {"float32": 0, "float64": 1, "int64": 2}
DIFFERENT, UNSUITED = -1, -2                                  # the C function returns them for another signature or array


class PairWork(HeadedWork):
    """The exchange of a pair on its way: the data follow the header at once."""

    def __init__(self, start: Start, array: Host):
        self._array = array
        super().__init__(start, array.view(np.uint8))

    def _advance(self) -> bool:
        if not self._same():
            return False
        add(self._arriving[HEADER_BYTES:HEADER_BYTES + self._array.nbytes].view(self._array.dtype), self._array)
        return self._land()


def add(arrived: Host, array: Host) -> None:
    """`array` becomes the sum, to the bit as the C function makes it: of two NaNs a processor keeps the one that happens to be
    on the left, so every NaN becomes the positive quiet one."""
    with np.errstate(over="ignore", invalid="ignore"):        # users of the sum look for Inf and NaN and say where
        np.add(arrived, array, out=array)
    if array.dtype.kind == "f":
        nan = np.isnan(array)
        if nan.any():
            array[nan] = np.nan


class Entry(ctypes.Structure):
    """The C function's arguments of one collective; `began` is the start of the running call (CLOCK_MONOTONIC ns), else 0."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("sendrecv", "byte", "comm", "header", "sending", "arriving")]
    _fields_ += [(name, ctypes.c_int64) for name in ("peer", "tag", "nbytes", "room", "kind", "began")]
    began: int

    def __init__(self, signature: Signature, array: Host, **common: Any):
        self.signature = signature
        self._header = ctypes.create_string_buffer(signature.header(0), HEADER_BYTES)
        super().__init__(header=ctypes.addressof(self._header), nbytes=array.nbytes, kind=KINDS[array.dtype.name], **common)
        self.pointer = ctypes.addressof(self)


class FastPair:
    """The blocking exchange in C."""

    def __init__(self, comm: MPI.Comm, channel: str, call: Callable[[int, Host, int], int], sendrecv: int):
        from mpi4py import MPI
        self._comm, self._channel, self._call, self._error = comm, channel, call, MPI.Exception
        self._buffers = [ctypes.create_string_buffer(HEADER_BYTES + PAIR_BYTES) for _ in range(2)]
        sending, arriving = (ctypes.addressof(buffer) for buffer in self._buffers)
        self._common = {"sendrecv": sendrecv, "byte": MPI._handleof(MPI.BYTE), "comm": MPI._handleof(comm), "sending": sending,
                        "arriving": arriving, "peer": 1 - comm.rank, "tag": HEADER_TAG, "room": HEADER_BYTES + PAIR_BYTES}
        self._last: Entry | None = None

    def entry(self, array: Host, signature: Signature) -> Entry:
        """The entry for arrays of this dtype and size."""
        return Entry(signature, array, **self._common)

    def run(self, entry: Entry, array: Host, sequence: int) -> bool:
        """Whether the sum is made; False where nothing was sent, for an array that C cannot take. DesyncError, PeerError."""
        self._last = entry
        code = self._call(entry.pointer, array, sequence)
        if code in (0, UNSUITED):
            return code == 0
        if code == DIFFERENT:
            check_header(np.frombuffer(self._buffers[1].raw, np.uint8), self._comm, self._channel, sequence, entry.signature)
        with lost_peer(f'{entry.signature.text} on channel "{self._channel}"'):
            raise self._error(code)

    def in_flight(self) -> list[InFlight]:
        """The call that blocks at this moment, as another thread sees it."""
        entry = self._last
        began = 0 if entry is None else entry.began
        if entry is None or not began:
            return []
        return [InFlight(entry.signature.text, self._channel, began / 1e9, (1 - self._comm.rank,))]


def fast_pair(comm: MPI.Comm, channel: str) -> FastPair | None:
    """The exchange in C; None without a compiler, or where MPI's handles are not pointers (MPICH's are integers)."""
    from mpi4py import MPI
    call, sendrecv = _builtin(), getattr(ctypes.CDLL(MPI.__file__), "MPI_Sendrecv", None)
    if call is None or sendrecv is None or MPI._sizeof(MPI.Comm) != ctypes.sizeof(ctypes.c_void_p):
        return None
    return FastPair(comm, channel, call, ctypes.cast(sendrecv, ctypes.c_void_p).value or 0)


@cache
def _builtin() -> Callable[[int, Host, int], int] | None:
    library = native.load("pair")
    if library is None:
        return None
    found: Callable[[int, Host, int], int] = native.builtin(library.exchange, native.FASTCALL)(None)
    return found
