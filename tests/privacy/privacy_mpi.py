"""Secure sums and noise on ranks: each acts some of the clients, and all have the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import PrivacyError
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.noise import Noise
from mpitrain.privacy.secure_round import SecureRound


def test_a_round_is_the_plain_sum_of_integers(comm: Any) -> None:
    channel = Channel(comm.Dup(), "secure")
    clients, gone_first, sent_and_gone = [3, 10, 11, 20, 40, 77], {11}, {20, 3}
    values = {n: np.random.default_rng(n).uniform(-1, 1, 5001).astype(np.float32) for n in clients}
    numbers = FixedPoint(1.0, 8)
    own = clients[channel.rank::channel.size]
    secure = SecureRound(channel, clients, own, numbers, 5001, 0.5001)
    assert secure.threshold == 4
    for n in own:
        if n not in gone_first:
            secure.add(n, values[n])
    with pytest.raises(PrivacyError, match="3 clients answer at the end, and privacy.threshold asks for 4"):
        secure.finish(lambda n: n not in sent_and_gone)       # on all ranks alike; nothing was told, so it can be asked again
    found = secure.finish(lambda n: n != 20)
    plain = sum(numbers.encode(values[n]) for n in clients if n not in gone_first)
    assert (found == numbers.decode(plain)).all()
    channel.close()


def test_ranks_without_a_client_take_part(comm: Any) -> None:
    channel = Channel(comm.Dup(), "secure")
    own = [1, 2] if channel.rank == 0 else []
    secure = SecureRound(channel, [1, 2], own, FixedPoint(2.0, 2), 3, 0.6)
    for n in own:
        secure.add(n, np.full(3, float(n)))
    assert (secure.finish() == 3.0).all()
    channel.close()


def test_noise_has_the_same_bits_on_all_ranks_and_others_each_time(comm: Any) -> None:
    channel = Channel(comm.Dup(), "noise")
    noise = Noise(channel)
    first, second = np.zeros(1003, np.float32), np.zeros(1003, np.float32)
    noise.add(first, 2.0, 0)
    noise.add(second, 2.0, 0)
    assert (first != second).mean() > 0.99
    assert 1.6 < first.std() < 2.4 and np.count_nonzero(first) == 1003        # each part has an owner
    everyone = channel.gather_objects(first.tolist())
    assert all(one == everyone[0] for one in everyone)
    channel.close()
