"""What is in flight on a shared channel: each all-reduce, and one thing that stands for all of them in `Progress`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.shared.engine import DONE, QUEUED, Plan

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import AnyWork
    from mpitrain.comm.shared.channel import SharedChannel


class Known(NamedTuple):
    """An array that has been summed before: what does it again."""

    run: Callable[[], int]
    plan: Plan
    array: Host
    flat: Host


class SharedWork:
    """An all-reduce on its way; like `interpreter.Work`."""

    __slots__ = ("address", "array", "channel", "crossing", "messages", "plan", "sequence", "state", "then")

    def __init__(self, channel: SharedChannel, plan: Plan, array: Host, address: int, sequence: int, messages: AnyWork | None,
                 then: Callable[[], None] | None = None):
        self.channel, self.plan, self.array, self.address, self.sequence = channel, plan, array, address, sequence
        self.state, self.messages, self.then = QUEUED, messages, then
        self.crossing: AnyWork | None = None

    @property
    def done(self) -> bool:
        return self.state == DONE and (self.messages is None or self.messages.done)

    @property
    def inner(self) -> AnyWork | None:
        """What is moved as a work of its own as well."""
        return self.messages

    def test(self) -> bool:
        """Move on as far as the others have come; whether the result is there. Never blocks."""
        if self.state != DONE:
            self.channel.move()
        return self.state == DONE and (self.messages is None or self.messages.test())

    def wait(self) -> None:
        """Return when the result is there; moves everything else in flight meanwhile."""
        if self.state != DONE:
            self.channel.wait(self)
        if self.messages is not None:
            self.messages.wait()
        self.channel.node.progress.discard(self)              # a thread gave it back: see `ProgressThread.take_back`


class Mover:
    """What stands for all shared works of a channel among what is in flight."""

    def __init__(self, channel: SharedChannel):
        self._channel, self.done = channel, True

    def enlist(self) -> None:
        if self.done:
            self.done = False
            self._channel.node.progress.add(self)

    def dismiss(self) -> None:
        self.done = True
        self._channel.node.progress.discard(self)

    def test(self) -> bool:
        self.done = self._channel.move()
        return self.done
