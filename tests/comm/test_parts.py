"""Signatures, tags, staging of GPU arrays, progress and the stop request, each by itself."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import timeit
from collections.abc import Callable
from types import SimpleNamespace

import fakecuda
import numpy as np
import pytest
from device_counts import counted
from fakegpu import put, xp
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, clean_environment

from mpitrain.comm.job.signals import StopRequest
from mpitrain.comm.messages.buffers import Pool, Pools, Staged
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import HEAD, MOST_BYTES, shape_told
from mpitrain.comm.messages.prepare import make_plan
from mpitrain.comm.messages.program import Messages, Operation, plain, translate
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature, data_tag, unpack
from mpitrain.errors import DesyncError
from mpitrain.schedules.collectives import ring
from mpitrain.schedules.steps import Copy, Receive, Reduce, Send, data, inbox


def test_a_header_says_who_runs_what() -> None:
    signature = Signature.of("allreduce", "w", "float32", 3)
    header = signature.header(7)
    assert len(header) == HEADER_BYTES and unpack(header) == (7, signature.checksum, "allreduce float32[3] w")


def test_names_that_differ_past_the_end_of_the_header_still_differ() -> None:
    long = "x" * 500
    assert Signature.of("allreduce", long + "1", "f", 1).checksum != Signature.of("allreduce", long + "2", "f", 1).checksum


@pytest.mark.promise("F11")
@given(header=st.binary(min_size=HEADER_BYTES, max_size=2 * HEADER_BYTES))
def test_any_bytes_are_a_header_that_can_be_compared(header: bytes) -> None:
    sequence, checksum, text = unpack(header)
    assert sequence >= 0 and checksum >= 0 and len(text) <= HEADER_BYTES


@pytest.mark.promise("F11")
@given(head=st.lists(st.one_of(st.integers(-2**63, 2**63 - 1), st.integers(0, 9)), min_size=HEAD, max_size=HEAD))
def test_a_shape_that_a_peer_tells_is_one_or_is_refused_before_memory_is_taken(head: list[int]) -> None:
    try:
        shape, dtype = shape_told(np.array(head, np.int64), "rank 1")
    except DesyncError as error:
        assert error.exit_code == 76 and "rank 1 as [" in str(error)
    else:
        assert math.prod(shape) * np.dtype(dtype).itemsize <= MOST_BYTES and shape == tuple(head[:len(shape)])
    assert shape_told(np.array([3, 4, 0, 0, 0, 0, 0, 0, 0, 2]), "rank 1") == ((3, 4), "float32")


@pytest.mark.promise("F11")
@pytest.mark.parametrize("told", [-1, (1 << 30) + 1, 1 << 62])
def test_a_length_of_an_object_that_no_object_has_is_refused_before_memory_is_taken(told: int) -> None:
    with pytest.raises(DesyncError, match=rf'channel "x": a rank tells of an object of {told} bytes'):
        Channel._length(SimpleNamespace(name="x"), np.int64(told))
    assert Channel._length(SimpleNamespace(name="x"), np.int64(1 << 30)) == 1 << 30


@given(sequence=st.integers(0, 2**40), name=st.text(max_size=20), bound=st.sampled_from([32767, 2**23 - 1, 2**31 - 1]))
def test_tags_fit_and_neighbouring_collectives_have_different_ones(sequence: int, name: str, bound: int) -> None:
    signature = Signature.of("allreduce", name, "float32", 3)
    tags = {data_tag(sequence + i, signature, bound) for i in range(128)}
    assert len(tags) == 128 and min(tags) >= 1 and max(tags) <= bound


def test_arrays_of_more_than_two_to_the_31_bytes_travel_in_messages_that_mpi_can_count() -> None:
    length = 3 << 31
    plans = [make_plan(ring, rank, 2, length, 4) for rank in range(2)]
    for plan in plans:
        received = [message for stage in plan.rounds for message in stage.receives]
        assert all(0 < stop - start <= 1 << 30 for _, start, stop, _ in received)
        assert sum(stop - start for _, start, stop, _ in received) == 4 * length
    sent = [[stop - start for _, start, stop, _ in stage.sends] for stage in plans[0].rounds]
    assert sent == [[stop - start for _, start, stop, _ in stage.receives] for stage in plans[1].rounds]


def test_steps_become_byte_ranges_split_at_the_limit_and_empty_rounds_vanish() -> None:
    reduce, copy = Reduce(inbox(0, 3), data(0, 3), data(0, 3)), Copy(data(0, 1), data(1, 2))
    stages = plain([[Receive(1, inbox(0, 3)), Send(2, data(1, 2)), reduce, copy], []])
    operations = (Operation("sum", (inbox(0, 3), data(0, 3), data(0, 3))),
                  Operation("copy", (data(0, 1), data(1, 2))))
    assert translate(stages, {"data": 4, "inbox": 4}, message_bytes=8) == [
        Messages((), (("inbox", 0, 8, 1), ("inbox", 8, 12, 1)), (("data", 4, 8, 2),), operations)]


def test_the_pool_gives_the_smallest_kept_buffer_that_fits() -> None:
    pool = Pool()
    small, large = pool.take(100), pool.take(10_000)
    pool.give(large)
    pool.give(small)
    assert pool.take(90) is small and pool.take(129) is large
    assert pool.take(1).nbytes == 64 and pool.allocated == 128 + 16384 + 64


def test_a_device_array_is_staged_and_comes_back_changed() -> None:
    array, pools = put(np.arange(6.0).reshape(2, 3)), Pools()
    with counted() as counts:
        for _ in range(2):
            staged = Staged(array, pools)
            staged.wait()
            assert isinstance(staged.host, np.ndarray) and staged.host.shape == (6,)
            staged.host += 1
            staged.close()
    np.testing.assert_array_equal(array.get(), np.arange(6.0).reshape(2, 3) + 2)
    assert pools.host.allocated == 0 and pools.staging(xp).allocated == 64                  # one buffer, used twice
    assert set(counts.syncs) == {"event"} and counts.down == counts.up == 2 * 48


def test_values_of_a_device_are_not_there_before_they_are_said_to_be() -> None:
    with fakecuda.lagging(2):
        staged = Staged(put(np.ones(3)), Pools())
        staged.host[:] = 5
        assert [staged.ready(), staged.ready()] == [False, False] and (staged.host == 5).all()
        assert staged.ready() and (staged.host == 1).all()


@pytest.mark.gpu
def test_a_cupy_array_is_summed_in_place() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("there is no GPU")
    from mpitrain.comm.job.start import start
    from mpitrain.comm.messages.channel import Channel
    channel = Channel(start().comm.Dup(), "test")
    array = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    channel.allreduce(array, name="x")
    channel.broadcast(array)
    assert (cupy.asnumpy(array) == np.arange(12).reshape(3, 4) * channel.size).all()
    channel.close()


class Countdown:
    """Something in flight that lands after so many tests."""

    def __init__(self, tests: int):
        self.left, self.done = tests, False

    def test(self) -> bool:
        self.left -= 1
        self.done = self.left <= 0
        return self.done


def test_progress_moves_everything_and_forgets_what_has_landed() -> None:
    progress, first, second = Progress(), Countdown(1), Countdown(2)
    progress.add(first)
    progress.add(second)
    assert not progress.only(first)
    progress.progress()
    assert first.done and not second.done and len(progress) == 1 and progress.only(second)
    progress.progress()
    assert second.done and len(progress) == 0


@pytest.mark.alone
def test_idle_progress_costs_less_than_ten_empty_calls() -> None:
    def cost(function: Callable[[], object]) -> float:
        return min(timeit.repeat(function, number=10_000, repeat=20))
    assert cost(Progress().progress) < 10 * cost(lambda: None)


def test_sigusr1_sets_the_flag() -> None:
    before, stop = signal.getsignal(signal.SIGUSR1), StopRequest()
    stop.listen()
    try:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.promise("E1")
def test_a_signal_that_was_blocked_until_the_program_listens_arrives_then() -> None:
    program = ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1); from mpitrain.comm.job.signals import StopRequest; "
               "stop = StopRequest(); stop.listen(); print(stop.asked)")
    for blocked, status, out in ((True, 0, "True\n"), (False, -signal.SIGUSR1, "")):
        masked = {signal.SIGUSR1} if blocked else set()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, masked)                 # the child inherits the mask
        try:
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert (done.returncode, done.stdout) == (status, out), done.stderr


@pytest.mark.parametrize(("program", "rc", "line"), [
    ("raise ValueError('odd')", 70, "mpitrain: E_USER rank=0/1 host="),
    ("raise KeyboardInterrupt", 130, "mpitrain: E_INTERRUPT rank=0/1 host="),
    ("raise SystemExit(0)", 0, ""),
    ("raise SystemExit(5)", 5, ""),
    ("return 4", 4, ""),
    ("import threading; threading.Thread(target=lambda: 1 / 0).start(); threading.Event().wait()", 70,
     "mpitrain: E_USER rank=0/1 host="),
])
def test_one_rank_alone_exits_with_its_code_and_at_most_one_line(program: str, rc: int, line: str) -> None:
    code = f"from mpitrain.comm.job.guard import Process\ndef main():\n    {program}\nProcess().run(main)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), timeout=20, capture_output=True,
                           text=True)
    assert found.returncode == rc
    assert found.stderr.startswith(line) and found.stderr.count("\n") == bool(line), found.stderr
