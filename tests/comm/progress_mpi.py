"""The thread that moves messages: it alone brings works to their end, with the bits of polling, beside other collectives."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import native
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.comm.messages.progress import Progress, threads_may_call_mpi
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.shared.node import Node
from mpitrain.comm.shared.queue import SharedWork
from mpitrain.errors import ConfigError
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer


def test_the_thread_alone_brings_works_to_their_end(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test")
    thread = channel.progress.thread()
    landed = threading.Event()
    channel.progress.landed = landed.set
    for _ in range(5):
        arrays = [np.ones(n) for n in (100_000, 0, 3)]
        with thread.lock:
            works = [channel.start_allreduce(array, f"bucket {i}") for i, array in enumerate(arrays)]
        for work in works:
            thread.hand_over(work)
        while not all(work.done for work in works):           # this thread makes no MPI call
            assert landed.wait(50)
            landed.clear()
        assert all((array == comm.size).all() for array in arrays)
        thread.take_back()
    assert len(channel.progress) == 0
    channel.progress.close()
    channel.close()


def test_messages_of_a_shared_channel_are_moved_by_one_thread(comm: Any) -> None:
    """Of an array outside the shared memory; rank 0 looks while its sum cannot end."""
    progress = Progress()
    node = Node(comm, progress)
    channel = SharedChannel(Channel(comm.Dup(), "test", progress=progress), node)
    if not channel.shared:
        pytest.skip("one rank shares with nobody")
    thread, array = progress.thread(), np.ones(100_000)
    if comm.rank:
        comm.recv(source=0)
    with thread.lock:
        work = channel.start_allreduce(array, "bucket")
    thread.hand_over(work)
    if comm.rank == 0:
        assert isinstance(work, SharedWork) and work.inner not in progress._works
        for other in range(1, comm.size):
            comm.send(None, dest=other)
    thread.take_back()
    work.wait()
    assert (array == comm.size).all() and len(progress) == 0
    progress.close()
    channel.close()
    node.close()


def test_works_that_are_taken_back_are_waited_for_as_usual(comm: Any) -> None:
    channel = Channel(comm.Dup(), "test")
    thread = channel.progress.thread()
    for _ in range(20):
        arrays = [np.ones(n) for n in (70_000, 5, 70_000)]
        works = []
        for array in arrays:
            with thread.lock:
                works.append(channel.start_allreduce(array, "bucket"))
            thread.hand_over(works[-1])
        thread.take_back()
        for work in reversed(works):
            work.wait()
        assert all((array == comm.size).all() for array in arrays)
    channel.progress.close()
    channel.close()


def test_other_channels_may_be_used_while_the_thread_owns_works(comm: Any) -> None:
    channel = Channel(comm.Dup(), "gradients")
    other = Channel(comm.Dup(), "control", progress=channel.progress)
    thread = channel.progress.thread()
    for _ in range(20):
        large, small = np.ones(200_000), np.ones(10)
        with thread.lock:
            work = channel.start_allreduce(large, "bucket")
        thread.hand_over(work)
        other.allreduce(small, name="batch norm")
        thread.take_back()
        work.wait()
        assert (large == comm.size).all() and (small == comm.size).all()
    channel.progress.close()
    other.close()
    channel.close()


def test_gradients_have_the_bits_of_polling(comm: Any) -> None:
    sums = []
    for threaded in (False, True):
        channel = Channel(comm.Dup(), "test")
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
        storage = model.initialize(seed=3, dtype="float32")
        reducer = GradientReducer(storage, AllReduce(channel), bucket_bytes=2000, progress=channel.progress.progress)
        channel.progress.landed = reducer.timeline.look
        reducer.mover = channel.progress.thread() if threaded else None
        rng = np.random.default_rng(comm.rank)
        for _ in range(3):
            reducer.begin()
            reducer.begin_micro_batch(last=True)
            run_backward(model(Tensor(rng.standard_normal((8, 40), dtype=np.float32))), np.ones((8, 40), np.float32),
                         progress=reducer.progress)
            reducer.finish()
        times = reducer.timeline.steps[-1]
        assert comm.size == 1 or all(a <= b <= c for a, b, c in zip(times.ready, times.start, times.end))
        sums.append(reducer.gradients.copy())
        channel.progress.close()
        channel.close()
    np.testing.assert_array_equal(*sums)


class Broken:
    done = False

    def test(self) -> bool:
        raise ValueError("broken")


def test_what_ends_the_thread_is_raised_where_its_works_are_taken_back(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(comm.Dup(), "test")
    seen: list[Any] = []
    failed = threading.Event()

    def hook(arguments: Any) -> None:
        seen.append(arguments.exc_value)
        failed.set()

    monkeypatch.setattr(threading, "excepthook", hook)
    thread = channel.progress.thread()
    thread.hand_over(Broken())
    assert failed.wait(50)
    with pytest.raises(ValueError, match="broken"):
        thread.take_back()
    assert len(seen) == 1                                     # what ends the job saw it too
    channel.progress.close()
    channel.close()


def test_an_mpi_for_one_thread_only_is_refused(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    channel = Channel(comm.Dup(), "test")
    with pytest.raises(ConfigError, match='comm.progress = "thread" needs an MPI that several threads may call'):
        channel.progress.thread()
    channel.close()


def test_what_is_in_flight_is_told_with_its_age_and_whom_it_waits_for(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    progress = Progress()
    node = Node(comm, progress)
    shared = SharedChannel(Channel(comm.Dup(), "sums", progress=progress), node)
    link = Link(comm.Dup(), "messages", progress)
    memory = shared.allocate(1 << 16)
    assert progress.in_flight() == []
    if comm.rank == 0:                                        # the others are not there yet
        works = [shared.start_allreduce(memory.view(np.float32), "bucket"), shared.messages.start_allreduce(np.ones(9), "loss"),
                 link.receive((3,), np.float32, 1, 0, "activations")]
        first, second, third = progress.in_flight()
        assert (first.what, first.channel, first.peers) == (
            "allreduce float32[16384] bucket at byte 0 of arena 0", "sums", tuple(range(1, comm.size)))
        assert (second.what, second.channel, second.peers) == ("allreduce float64[9] loss", "sums", (comm.size - 1,))
        assert (third.what, third.channel, third.peers) == ("receiving activations from rank 1", "messages", (1,))
        assert time.monotonic() - 60 < first.began <= second.began <= third.began <= time.monotonic()
    comm.Barrier()
    if comm.rank:
        works = [shared.start_allreduce(memory.view(np.float32), "bucket"), shared.messages.start_allreduce(np.ones(9), "loss")]
        if comm.rank == 1:
            works.append(link.send(np.ones(3, np.float32), 0, 0, "activations"))
    for work in works:
        work.wait()
    assert progress.in_flight() == []
    link.close()
    shared.close()
    node.close()


def test_a_small_sum_that_blocks_in_c_is_in_flight_too(comm: Any) -> None:
    """As another thread sees it."""
    if comm.size != 2 or native.load("pair") is None or not threads_may_call_mpi():
        pytest.skip("made for two ranks, with a C compiler and threads")
    channel = Channel(comm.Dup(), "control")
    loss = channel.prepare(np.ones(3), "loss")
    loss.run()
    assert channel.progress.in_flight() == []
    if comm.rank == 0:
        thread = threading.Thread(target=loss.run)
        thread.start()
        while not (found := channel.progress.in_flight()):
            pass
        assert [(one.what, one.channel, one.peers) for one in found] == [("allreduce float64[3] loss", "control", (1,))]
        comm.send(None, dest=1)
        thread.join()
    else:
        comm.recv(source=0)
        loss.run()
    assert channel.progress.in_flight() == []
    channel.close()
