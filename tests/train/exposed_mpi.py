"""The loss and the ranks' seconds travel in one message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.train.trainer import Trainer


def test_the_loss_is_a_sum_and_the_seconds_are_each_ranks_own(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test")
    trainer: Any = SimpleNamespace(channel=channel, _message=np.empty(0))
    for step in range(3):
        parts = np.zeros(comm.size)
        parts[comm.rank] = comm.rank
        loss, seconds = Trainer.share(trainer, parts, (0.25 * comm.rank, float(step)))
        assert loss == sum(range(comm.size))
        assert seconds.tolist() == [[0.25 * rank for rank in range(comm.size)], [float(step)] * comm.size]
    channel.close()
