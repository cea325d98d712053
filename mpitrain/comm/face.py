"""The face of every channel, whether its ranks send messages, share memory, or there is only one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.comm.shared.channel import SharedChannel


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


AnyChannel: TypeAlias = "Channel | SharedChannel"
"""Both answer the same questions, about collectives over arrays. All methods are collective in the same order on all ranks."""
