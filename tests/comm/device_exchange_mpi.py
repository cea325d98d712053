"""Collectives of arrays on a device, by the stand-in: the sums of the host's arrays, with copies that come late."""

from __future__ import annotations

from typing import Any

import fakecuda
import numpy as np
import pytest
from device_counts import counted
from fakegpu import put

from mpitrain.comm.messages.channel import Channel


def arrays(rank: int, sizes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(10 * rank + i).standard_normal(size).astype(np.float32) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct"])
@pytest.mark.parametrize("sizes", [(5, 17), (40_000, 3, 70_001)])
def test_sums_on_a_device_are_those_of_the_host_however_late_its_copies_come(comm: Any, algorithm: str, sizes: tuple[int, ...]
                                                                             ) -> None:
    """Several sums are on their way at once, twice, so that pinned buffers are used again."""
    channel = Channel(comm.Dup(), "sums", algorithm=algorithm)
    for lag in (0, 3, 40):
        ours = arrays(channel.rank, sizes)
        on_device = [put(x) for x in ours]
        with fakecuda.lagging(lag):
            works = [channel.prepare(x, f"sum {i}").start() for i, x in enumerate(on_device)]
            for work in reversed(works):
                work.wait()
        for i, x in enumerate(ours):
            channel.prepare(x, f"sum {i}").run()
            np.testing.assert_array_equal(on_device[i].get(), x)
    channel.close()


def test_a_sum_that_has_begun_waits_for_no_copy(comm: Any) -> None:
    channel = Channel(comm.Dup(), "sums", algorithm="ring")
    x = put(np.ones(100_000, np.float32))
    with fakecuda.lagging(1000), counted() as counts:
        work = channel.prepare(x, "sum").start()
        assert not counts.syncs
        work.wait()
    assert float(x.get()[7]) == channel.size
    channel.close()
