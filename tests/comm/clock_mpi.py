"""The ranks of one machine share a clock, so the offsets between them are known."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mpitrain.comm.job import clock
from mpitrain.comm.messages.channel import Channel


@pytest.mark.parametrize("ahead", [0.0, 5.0])
def test_the_offset_is_right_within_the_error_that_is_stated(comm: Any, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: time.perf_counter() + ahead * comm.rank)
    channel = Channel(comm.Dup(), "clocks")
    found = clock.clock_offsets(channel)
    if comm.rank:
        assert found == []
    else:
        assert [offset.error > 0 for offset in found] == [rank > 0 for rank in range(comm.size)]
        assert all(abs(offset.seconds - ahead * rank) <= offset.error for rank, offset in enumerate(found))
    channel.close()
