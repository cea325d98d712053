"""Messages between two ranks of a channel's communicator: activations to the next stage, their gradients back.

Both ends know what travels: the receiver says shape and dtype. Sends do not wait for the receiver, and hold on to their memory
until it has left; everything in flight moves with the rest (`Progress`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, asnumpy
from mpitrain.backend.dtype import half_dtype
from mpitrain.comm.job.start import tag_upper_bound
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.interpreter import HEADER_TAG
from mpitrain.comm.messages.polled import PolledWork
from mpitrain.errors import DesyncError, PeerError, ShapeError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.messages.progress import Progress

DIMS = 8                                                      # an array may have so many dimensions at most
HEAD = DIMS + 2                                               # numbers in a message that says a shape: dims, dtype, how many dims
MOST_BYTES = 1 << 40                                          # of an array: no rank has memory for a tenth of it
ABANDONED = -1                                                # in place of a dtype: the sender has failed, and nothing comes
KINDS = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool", "bfloat16")


class Abandoned(PeerError):
    """What was awaited does not come: virtual stage `at` of another rank has failed, which says why."""

    def __init__(self, at: int):
        super().__init__(f"virtual stage {at} has failed")
        self.at = at


class Message(PolledWork):
    """One send or receive on its way; `array` is sent, or filled when the message arrives."""

    def __init__(self, request: Any, array: Host, what: str, peer: int, channel: str, progress: Progress):
        super().__init__(what, channel, progress, lambda: None)
        self.array, self._request, self._peer = array, request, peer

    def _peers(self) -> tuple[int, ...]:
        return (self._peer,)

    def _advance(self) -> bool:
        return self._land() if self._request.Test() else False


class Link:
    """Sends and receives by (peer, tag). Tags are small numbers; messages of one tag between two ranks keep their order."""

    cross = None

    def __init__(self, comm: MPI.Comm, name: str, progress: Progress):
        self.comm, self.name, self.progress = comm, name, progress
        self.rank, self.size = comm.rank, comm.size
        self._sending: deque[Message] = deque()
        self._tags = tag_upper_bound() - HEADER_TAG - 1

    @property
    def messages(self) -> Link:
        return self

    def send(self, array: Array, peer: int, tag: int, what: str) -> Message:
        """Begin to send; nothing may write to `array` until the message is done."""
        host = np.ascontiguousarray(asnumpy(array))
        request = self.comm.Isend(_bytes(host), peer, self._tag(tag))
        message = Message(request, host, f"sending {what} to rank {peer}", peer, self.name, self.progress)
        while self._sending and self._sending[0].done:
            self._sending.popleft()
        self._sending.append(message)
        return self.progress.added(message)

    def receive(self, shape: tuple[int, ...], dtype: Any, peer: int, tag: int, what: str, *, into: Host | None = None) -> Message:
        """Begin to receive an array; it is in the message's `array` once that is done: in new memory, or that of `into`."""
        host = np.empty(shape, dtype_named(dtype)) if into is None else into
        assert host.flags.c_contiguous, f"{what}: bytes arrive one after the other"
        request = self.comm.Irecv(_bytes(host), peer, self._tag(tag))
        return self.progress.added(Message(request, host, f"receiving {what} from rank {peer}", peer, self.name, self.progress))

    def send_shape(self, array: Array, peer: int, tag: int, what: str) -> None:
        """Tell the peer the shape and dtype of arrays to come."""
        dtype = np.dtype(array.dtype).name
        if array.ndim > DIMS or dtype not in KINDS:
            raise ShapeError(f"{what} is {array.shape} {dtype}, which cannot be sent; at most {DIMS} dims of {', '.join(KINDS)}")
        head = np.zeros(HEAD, np.int64)
        head[:array.ndim], head[DIMS], head[DIMS + 1] = array.shape, KINDS.index(dtype), array.ndim
        self.send(head, peer, tag, f"the shape of {what}")

    def send_failure(self, at: int, peer: int, tag: int, what: str) -> None:
        """Tell the peer that waits for a shape that none comes, since virtual stage `at` has failed."""
        head = np.full(HEAD, ABANDONED, np.int64)
        head[0] = at
        self.send(head, peer, tag, f"that there is no {what}")

    def receive_shape(self, peer: int, tag: int, what: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype that the peer tells by `send_shape`; waits for them. Abandoned after its `send_failure`."""
        message = self.receive((HEAD,), np.int64, peer, tag, f"the shape of {what}")
        message.wait()
        if message.array[DIMS] == ABANDONED:
            raise Abandoned(int(message.array[0]))
        return shape_told(message.array, f"rank {peer} tells the shape of {what}")

    def finish(self, left: int = 0) -> None:
        """Return when everything that was sent has left, but for the last `left` messages."""
        while len(self._sending) > left:
            self._sending.popleft().wait()

    @property
    def sent_bytes(self) -> int:
        """The bytes of sent arrays still held here: their sends were not seen to be done."""
        return sum(message.array.nbytes for message in self._sending)

    def close(self) -> None:
        """Free the communicator; collective. Nothing may be in flight."""
        self.finish()
        self.comm.Free()

    def _tag(self, tag: int) -> int:
        return HEADER_TAG + 1 + tag % self._tags


def shape_told(head: Array, who: str) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) in the HEAD numbers that another rank sent; DesyncError unless memory could be taken for them."""
    numbers = [int(n) for n in head]
    kind, dims = numbers[DIMS:DIMS + 2]
    if not (0 <= dims <= DIMS and 0 <= kind < len(KINDS) and all(n >= 0 for n in numbers[:dims])
            and math.prod(numbers[:dims]) * dtype_named(KINDS[kind]).itemsize <= MOST_BYTES):
        raise DesyncError(f"{who} as {numbers}, which is none; ranks run different programs, or a message was damaged")
    return tuple(numbers[:dims]), KINDS[kind]


def dtype_named(dtype: Any) -> np.dtype[Any]:
    """A dtype, or the one of that name; NumPy has none of the name "bfloat16" of itself."""
    return half_dtype(dtype) if dtype == "bfloat16" else np.dtype(dtype)


def _bytes(host: Host) -> Host:
    return host.reshape(-1).view(np.uint8)
