"""What all tests share: a communicator per test, and a watchdog that ends a hung rank with everyone's stack.

Files named ``*_mpi.py`` hold collective logic. A plain ``pytest tests`` does not collect them itself: test_under_mpirun.py
starts them on 1, 2, 3 and 4 ranks. Under mpirun, the first failure on any rank ends the job, because the other ranks' next
collective would otherwise pair with the wrong one and hang.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.comm.job.start import launched_rank

sys.path.insert(0, str(Path(__file__).resolve().parent))      # tests say: from launch import mpirun

# All processes that tests start share one folder of compiled Python: where PYTHONDONTWRITEBYTECODE is set, each rank compiled for
# half a second.
if "PYTHONPYCACHEPREFIX" not in os.environ:
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="mpitrain-bytecode-")
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
signal.signal(signal.SIGINT, signal.default_int_handler)      # tests in the background of a shell inherit that it is ignored

RANK, SIZE = launched_rank()
if SIZE == 1:                             # an example that takes 200 ms, on a machine that does other work as well, is no failure
    import hypothesis
    hypothesis.settings.register_profile("mpitrain", deadline=None)
    hypothesis.settings.load_profile("mpitrain")
if SIZE > 1:                              # ranks that share one folder of pytest's remove each other's in it
    shared = os.environ.get("PYTEST_DEBUG_TEMPROOT") or None
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="mpitrain-rank-", dir=shared)
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)
LIMIT = float(os.environ.get("MPITRAIN_TEST_LIMIT", "60"))    # seconds one test may take on a rank under mpirun
STACKS = signal.SIGUSR2


def pytest_configure(config: pytest.Config) -> None:
    if SIZE > 1:
        config.pluginmanager.register(RankPlugin(), "mpitrain-rank")


def pytest_sessionfinish() -> None:
    if "standing" in sys.modules:             # ranks that stay between tests
        sys.modules["standing"].close_all()


class RankPlugin:
    """Under mpirun: the watchdog, and the end of the job at the first failure."""

    def __init__(self) -> None:
        self._terminal = os.fdopen(os.dup(2), "w")            # before pytest captures the stream for a test
        self._peers: list[int] = []
        faulthandler.register(STACKS, file=self._terminal, all_threads=False)    # others may run Python: the handler has crashed

    def pytest_sessionstart(self) -> None:
        self._peers = world().allgather(os.getpid())          # one machine: every peer can be signalled

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        watchdog = threading.Timer(LIMIT, self._give_up, (item.nodeid,))
        watchdog.daemon = True
        watchdog.start()
        yield
        watchdog.cancel()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(f"{report.nodeid} failed in {report.when}\n{report.longreprtext}")
            world().Abort(1)

    def _give_up(self, test: str) -> None:
        self._say(f"{test} still runs after {LIMIT:g} s; the stacks of all ranks:")
        for pid in self._peers:
            os.kill(pid, STACKS)                              # the fault handler answers in C, whatever Python waits for
        threading.Event().wait(1.0)                           # let them write before the launcher ends them
        world().Abort(1)

    def _say(self, text: str) -> None:
        self._terminal.write(f"[rank {RANK}/{SIZE}] {text}\n")
        self._terminal.flush()


def world() -> Any:
    from mpitrain.comm.job.start import start
    return start().comm


@pytest.fixture
def comm() -> Iterator[Any]:
    """A duplicate of the world for one test, so that what it leaves in flight cannot meet the next test's."""
    duplicate = world().Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def mpi_tmp_path(tmp_path: Path) -> Path:
    """One empty folder, the same on all ranks."""
    return Path(world().bcast(str(tmp_path), root=0))

