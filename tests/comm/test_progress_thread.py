"""The thread that moves messages, without any: how it ends."""

from __future__ import annotations

import threading

import pytest

from mpitrain.comm.messages import progress
from mpitrain.comm.messages.progress import Progress, ProgressThread

PATIENCE = 20.0                           # seconds for what takes microseconds


class Gate(threading.Event):
    """Who has asked for the end in vain stays here until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.go = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        ended = super().wait(timeout)
        if not ended:
            self.arrived.set()
            self.go.wait()
        return ended


def test_a_thread_that_was_about_to_look_when_it_was_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "threads_may_call_mpi", lambda: True)
    thread = ProgressThread(Progress())
    thread._end = gate = Gate()
    thread._wake.set()
    assert gate.arrived.wait(PATIENCE)
    thread.take_back()
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    assert thread._wake.wait(PATIENCE)                        # all that `close` does has been done, but for waiting
    gate.go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_rank_that_waits_for_long_sleeps_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("os.sched_yield", lambda: done.append("yield"))
    monkeypatch.setattr("time.sleep", lambda seconds: done.append("sleep"))
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = Progress()
    progress.pause(began=99.0)
    progress.crowded = True
    progress.pause(began=99.0)
    progress.pause(began=100.0)
    assert done == ["yield", "sleep", "yield"]
