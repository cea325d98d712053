"""Sums of ranks that share one GPU, over a stand-in whose processes map each other's memory, with device work that comes late."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import fakecuda
import numpy as np
import pytest
from fakegpu import xp

from mpitrain.backend import Device
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError, DesyncError
from mpitrain.parallel.gradients import ipc_sum
from mpitrain.parallel.gradients.ipc_sum import IpcSum
from mpitrain.parallel.gradients.nccl_sum import NcclSum

GPU = Device("gpu", xp)
BUCKETS = ((0, 3), (16, 1000), (1008, 1008), (1013, 6001))                   # one empty, one that begins where no vector may


@pytest.fixture
def opened(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MPITRAIN_FAKE_BUS", "0000:01:00.0")
    if comm.size == 1:
        pytest.skip("one rank sums nothing")
    channel = Channel(comm.Dup(), "gradients", algorithm="direct")
    bucket_sum = IpcSum(channel, GPU)
    arena = bucket_sum.allocate(4 * 6016)[:4 * 6016].view(np.float32)
    yield channel, bucket_sum, arena
    channel.close()


def bucket(name: str) -> Any:
    return SimpleNamespace(name=name, apart=None)


def values(rank: int, step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(100 * step + rank).standard_normal(6016).astype(np.float32)


def write_late(arena: Any, new: np.ndarray[Any, Any]) -> None:
    fakecuda.copy_later(partial(np.copyto, arena._memory, new))


@pytest.mark.parametrize("lag", [0, 3, 50])
def test_the_bits_are_those_of_direct_messages_however_late_the_devices_are(opened: Any, lag: int, monkeypatch: pytest.MonkeyPatch
                                                                            ) -> None:
    """What backward writes and what kernels add happens when its event has been asked for `lag` times, on odd ranks twice so
    often; the buckets are all in flight at once, waited for in another order on each rank, and written again in the next step."""
    channel, bucket_sum, arena = opened
    add_up = ipc_sum.sum_of_ranks
    monkeypatch.setattr(ipc_sum, "sum_of_ranks", lambda *arguments: fakecuda.copy_later(partial(add_up, *arguments)))
    sums = [bucket_sum.prepare(bucket(f"bucket {i}"), [arena[start:stop]]) for i, (start, stop) in enumerate(BUCKETS)]
    for step in range(3):
        wanted = values(channel.rank, step)
        for i, (start, stop) in enumerate(BUCKETS):
            channel.allreduce(wanted[start:stop], name=f"expected {i}")
        with fakecuda.lagging(lag * (1 + channel.rank % 2)):
            write_late(arena, values(channel.rank, step))
            works = [one.start() for one in sums]
            for work in np.roll(np.array(works), channel.rank):
                work.wait()
            np.testing.assert_array_equal(arena._memory, wanted)
            assert not fakecuda._late and not channel.progress.in_flight()


def test_a_sum_that_has_begun_waits_for_nothing_and_says_for_whom_it_waits(opened: Any, comm: Any) -> None:
    channel, bucket_sum, arena = opened
    one = bucket_sum.prepare(bucket("bucket"), [arena[16:1000]])
    comm.Barrier()
    if channel.rank:
        work = one.start()
        while not channel.progress.in_flight()[0].peers:
            assert not work.test()
        assert channel.rank not in channel.progress.in_flight()[0].peers
    comm.Barrier()
    if not channel.rank:
        work = one.start()
    work.wait()


def test_a_rank_that_sums_another_bucket_is_found_before_anything_is_added(opened: Any) -> None:
    channel, bucket_sum, arena = opened
    arena.fill(1)
    start = 16 * channel.rank
    work = bucket_sum.prepare(bucket("bucket"), [arena[start:start + 100]]).start()
    with pytest.raises(DesyncError, match="sum on one GPU at byte"):
        work.wait()
    assert (arena._memory == 1).all()
    channel.messages.comm.Barrier()


@pytest.mark.parametrize("library", ["ipc", "nccl"])
def test_gradients_of_experts_are_summed_over_the_ranks_that_have_copies_of_them(opened: Any, comm: Any, library: str,
                                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    channel, bucket_sum, arena = opened
    monkeypatch.delenv("MPITRAIN_FAKE_BUS")
    pair = Channel(comm.Split(channel.rank // 2), "gradients of experts")
    arena.fill(1 + channel.rank)
    own = bucket_sum if library == "ipc" else NcclSum(channel, GPU)
    own.prepare(SimpleNamespace(name="experts", apart=pair), [arena[16:1000]]).run()
    there = [rank for rank in range(channel.size) if rank // 2 == channel.rank // 2]
    assert (arena._memory[16:1000] == sum(1 + rank for rank in there)).all() and float(arena[0]) == 1 + channel.rank
    pair.close()


def test_ranks_of_different_gpus_are_refused_on_all_of_them(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size == 1:
        pytest.skip("one rank sums nothing")
    monkeypatch.setenv("MPITRAIN_FAKE_BUS", f"0000:0{comm.rank // 2}:00.0" if comm.size > 2 else f"0000:0{comm.rank}:00.0")
    channel = Channel(comm.Dup(), "gradients")
    with pytest.raises(ConfigError, match=f"rank {1 if comm.size == 2 else 2} .*; set comm.library"):
        IpcSum(channel, GPU)
    channel.close()


def test_memory_that_cuda_does_not_open_is_refused_on_all_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size == 1:
        pytest.skip("one rank sums nothing")

    def refuse(handle: bytes, flags: int) -> int:
        raise RuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
    monkeypatch.setenv("MPITRAIN_FAKE_BUS", "0000:01:00.0")
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(fakecuda.runtime, "ipcOpenMemHandle", refuse)
    channel = Channel(comm.Dup(), "gradients")
    with pytest.raises(ConfigError, match="cannot share memory between these ranks: cudaErrorMapBufferObjectFailed"):
        IpcSum(channel, GPU).allocate(100)
    channel.close()
