"""Collectives of arrays on a device, by the stand-in: the sums of the host's arrays, with copies that come late."""

from __future__ import annotations

from typing import Any

import fakecuda
import numpy as np
import pytest
from device_counts import counted
from device_races import watched
from fakegpu import put

from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import DesyncError
from mpitrain.schedules.ring import ring_all_gather, ring_reduce_scatter


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


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", ["ring", "segmented_ring", "halving_doubling", "recursive_doubling", "direct"])
def test_sums_that_devices_pack_have_the_bits_of_those_that_hosts_pack(comm: Any, algorithm: str, wire: str) -> None:
    """And no more goes over the bus than messages carry, but for what others are added to first."""
    channel = Channel(comm.Dup(), "sums", algorithm=algorithm, wire=wire)
    sizes = (4, 40_002)
    for lag in (0, 40):
        ours = arrays(channel.rank, sizes)
        on_device = [put(x) for x in ours]
        with fakecuda.lagging(lag), counted() as counts:
            works = [channel.prepare(x, f"sum {i}").start() for i, x in enumerate(on_device)]
            for work in reversed(works):
                work.wait()
        for i, x in enumerate(ours):
            channel.prepare(x, f"sum {i}").run()
            assert on_device[i].get().tobytes() == x.tobytes()
        assert channel.size == 1 or counts.up == 2 * sum(sizes) and counts.down <= 4 * sum(sizes)
        assert channel.size != 2 or counts.down == (2 if algorithm == "recursive_doubling" else 3) * sum(sizes)
    channel.close()


def test_a_scattered_sum_comes_back_in_float32_and_alone(comm: Any) -> None:
    channel = Channel(comm.Dup(), "sums", wire="bfloat16")
    ours, = arrays(channel.rank, (4001,))
    on_device = put(ours)
    with counted() as counts:
        there = channel.reduce_scatter(on_device, ring_reduce_scatter, name="slice")
    here = channel.reduce_scatter(ours, ring_reduce_scatter, name="slice")
    assert there.get().tobytes() == here.tobytes()
    assert channel.size == 1 or counts.up == here.nbytes
    channel.close()


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "halving_doubling", "direct"])
def test_mpi_that_takes_memory_of_devices_makes_the_same_sums_and_nothing_crosses_the_bus(comm: Any, algorithm: str,
                                                                                          wire: str | None) -> None:
    """Several at once, twice, that are waited for in another order than they began in."""
    channel, staged = (Channel(comm.Dup(), name, algorithm=algorithm, wire=wire) for name in ("there", "staged"))
    channel.device_buffers = True
    sizes = (3, 40_002, 0)
    for _ in range(2):
        ours = arrays(channel.rank, sizes)
        on_device = [put(x) for x in ours]
        with counted() as counts:
            works = [channel.prepare(x, f"sum {i}").start() for i, x in enumerate(on_device)]
            for work in reversed(works):
                work.wait()
        assert counts.up == counts.down == counts.n_syncs == 0
        for i, x in enumerate(ours):
            staged.prepare(x, f"sum {i}").run()
            assert on_device[i].get().tobytes() == x.tobytes()
    channel.close()
    staged.close()


@pytest.mark.parametrize(("wire", "handed_over"), [(None, False), ("bfloat16", False), ("bfloat16", True)])
def test_streams_wait_for_what_others_write_before_and_after_a_sum(comm: Any, wire: str | None, handed_over: bool) -> None:
    channel = Channel(comm.Dup(), "sums", algorithm="direct", wire=wire)
    channel.device_buffers = handed_over
    with watched():
        whole = put(np.ones(600, np.float32))
        for _ in range(2):
            works = []
            for i in (0, 1):
                part = whole[300 * i:300 * i + 300]
                part *= 2
                works.append(channel.prepare(part, f"sum {i}").start())
            for work in works:
                work.wait()
            whole *= 0.5
    assert (whole.get() == channel.size ** 2).all()
    channel.close()


def test_slices_are_summed_and_gathered_in_memory_of_devices(comm: Any) -> None:
    channel = Channel(comm.Dup(), "slices")
    channel.device_buffers = True
    ours, = arrays(channel.rank, (4001,))
    on_device, total = put(ours), ours.copy()
    channel.prepare(total, "sum").run()
    with counted() as counts:
        channel.reduce_scatter(on_device, ring_reduce_scatter, name="slice")
        channel.all_gather(on_device, ring_all_gather, name="slices")
    assert counts.up == counts.down == 0
    np.testing.assert_allclose(on_device.get(), total, rtol=0, atol=1e-5)
    channel.close()


def test_a_rank_that_is_at_another_sum_is_found_with_memory_of_devices_too(comm: Any) -> None:
    if comm.size == 1:
        return
    channel = Channel(comm.Dup(), "sums", algorithm="ring")
    channel.device_buffers = True
    with pytest.raises(DesyncError, match="every rank must start the same collectives in the same order"):
        channel.prepare(put(np.ones(100, np.float32)), f"sum {channel.rank}").run()
