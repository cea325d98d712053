"""Fixtures of tests that run on ranks: channels whose ranks act to be on several nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.node import Node


@pytest.fixture
def connect(comm: Any) -> Iterator[Callable[..., Any]]:
    """Makes a channel between all ranks: without nodes, or with shared memory and the node that each rank acts to be on."""
    made: list[Any] = []

    def connect(node_of: Callable[[int], int] | None = None) -> Any:
        progress = Progress()
        channel: Any = Channel(comm.Dup(), "test", progress=progress)
        if node_of is not None:
            channel = SharedChannel(channel, Node(comm, progress, color=node_of(comm.rank)))
        made.append(channel)
        return channel

    yield connect
    for channel in made:
        channel.close()
        if channel.node is not None:
            channel.node.close()
