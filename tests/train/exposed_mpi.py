"""The loss and the waiting time travel in one message: the loss is a sum, the time the smallest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.train.trainer import Trainer


def test_the_rank_that_waited_least_gives_the_time(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test")
    trainer: Any = SimpleNamespace(channel=channel, _message=np.empty(0))
    for least in range(comm.size):
        waited = 0.25 if comm.rank == least else 1.0 + comm.rank
        parts = np.zeros(comm.size)
        parts[comm.rank] = comm.rank
        assert Trainer.share(trainer, parts, waited) == (sum(range(comm.size)), 0.25)
    channel.close()
