"""The loss and the ranks' seconds travel in one message."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.train.loss_message import LossMessage


def test_the_loss_is_a_sum_and_who_waited_least_gives_the_time(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test")
    share = LossMessage(channel)
    for step in range(3):
        parts = np.zeros(comm.size)
        parts[comm.rank] = comm.rank
        seconds = 2.0 + (comm.rank - step) ** 2, 0.25 * comm.rank, float(step)
        loss, waited, worked, loaded = share(parts, seconds)
        assert loss == sum(range(comm.size))
        assert waited == (2.0 if step < comm.size else 2.0 + (comm.size - 1 - step) ** 2)
        if comm.size > 1:
            assert worked.tolist() == [0.25 * rank for rank in range(comm.size)] and loaded.tolist() == [step] * comm.size
    channel.close()
