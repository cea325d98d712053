"""The face of every channel, whether its ranks send messages, share memory, or there is only one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mpitrain.backend import Array
    from mpitrain.comm.messages.buffers import Host
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.comm.shared.node import Node
    from mpitrain.comm.work import Collective, Work
    from mpitrain.schedules.steps import Algorithm


class Objects(Protocol):
    """A channel for plain JSON data between ranks; `Channel` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_objects(self, value: Any, /) -> list[Any]:
        """Everyone's `value` in rank order, on every rank."""
    def broadcast_object(self, value: Any, /) -> Any:
        """Rank 0's `value`, on every rank."""


class AnyChannel(Protocol):
    """A `Channel` or a `SharedChannel`. All methods are collective in the same order on all ranks."""

    name: str
    rank: int
    size: int

    @property
    def algorithm(self) -> str | Algorithm: ...
    @property
    def messages(self) -> Channel:
        """The channel of the same ranks that takes arrays wherever they lie."""
    @property
    def shared(self) -> bool:
        """Whether ranks of a node sum in shared memory the arrays that lie in it."""
    @property
    def shares_all(self) -> bool:
        """Whether all ranks share memory and all of it could be had, so that no sum of arrays in it needs a message."""
    @property
    def node(self) -> Node | None:
        """The ranks of this host, where they share memory."""
    @property
    def cross(self) -> Channel | None:
        """The channel to the same-numbered ranks of other nodes, where nodes sum in shared memory first."""
    @property
    def notes(self) -> list[str]:
        """Reasons why memory that should be shared is not, a line each."""
    def allocate(self, nbytes: int) -> Host:
        """`nbytes` bytes, zero at first, on a cache line; shared between ranks where they share memory."""
    def everywhere(self, own: Host) -> list[Host]:
        """Every rank's memory of one `allocate`, in rank order; an empty list where one cannot be reached from here."""
    def allreduce(self, array: Array, *, name: str) -> None:
        """`prepare` and `run`."""
    def prepare(self, array: Array, name: str) -> Collective:
        """The all-reduce of this very array, in place; the same bits on every rank."""
    def prepare_steps(self, array: Array, name: str, steps: Algorithm, /) -> Collective:
        """An all-reduce of the caller's own steps, by messages."""
    def prepare_slice(self, array: Array, name: str, own: tuple[int, int], steps: Algorithm) -> Collective:
        """A reduce-scatter; this rank keeps elements `own`. In shared memory where `shares_all`, else messages by `steps`."""
    def start_allreduce(self, array: Array, name: str) -> Work:
        """`prepare` and `start`."""
    def close(self) -> None:
        """Free what this owns; collective, like its making. Nothing may be in flight."""
