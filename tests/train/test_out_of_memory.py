"""A rank that the system kills for want of memory, in a control group of its own job, and one that somebody kills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import mpirun
from runs import SMALL, write

from mpitrain.comm.watch import memory

ROOT, LIMIT = Path("/sys/fs/cgroup"), 500 << 20
NET = """
import os
import numpy as np
from mpitrain import nn
class Eat(nn.Linear):
    steps = 0
    def forward(self, x):
        Eat.steps += self.training
        if Eat.steps == 5 and os.environ["OMPI_COMM_WORLD_RANK"] == os.environ.get("VICTIM"):
            if os.environ["HOW"] == "kill": os.kill(os.getpid(), 9)
            kept = [np.ones(1 << 22) for _ in range(100)]
        return super().forward(x)
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", Eat(64, 32)), ("b", nn.Linear(32, 10)))
"""
ENTER = ("import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
         "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may have LIMIT bytes."""
    v1 = (ROOT / "memory/memory.limit_in_bytes").exists()
    folder = ROOT / ("memory" if v1 else "") / f"mpitrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"a control group with a limit on memory cannot be made here: {error}")
    yield folder
    deadline = time.monotonic() + 5
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.rmdir()


@pytest.mark.promise("A2")
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])     # rank 0 has started the watcher
def test_a_rank_that_is_killed_for_want_of_memory_is_named_with_the_limit(tmp_path: Path, group: Path, victim: int) -> None:
    (tmp_path / "net.py").write_text(NET)
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))

    def train(how: str) -> list[str]:
        result = mpirun(2, "-c", ENTER, str(group / "cgroup.procs"), "-m", "mpitrain", "train", config, f"run.out={how}",
                        env={"VICTIM": str(victim), "HOW": how}, cwd=tmp_path)
        assert result.rc == 137 and not result.orphans, result.err
        return result.error_lines

    line, = train("eat")
    for words in (f"E_MEMORY rank={victim}/2 host=", " step=", "phase=forward", "probably out of memory: it had ", str(group),
                  "may have 500 MiB", "train.micro_batches"):
        assert words in line, line
    assert line.partition(": ")[2] in (tmp_path / f"eat/errors/rank-{victim}.stack.txt").read_text()
    line, = train("kill")
    assert f"E_PEER rank={victim}/2" in line and "memory" not in line


def test_the_counters_of_both_kinds_of_groups_and_of_the_host_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as the kernel writes them stand in for groups of the kind that this machine does not have."""
    monkeypatch.setattr(memory, "ROOT", str(tmp_path))
    monkeypatch.setattr(memory, "HOST", str(tmp_path / "vmstat"))
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\n")
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/memory.max").write_text("1048576\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    events = tmp_path / "job/step/memory.events"
    events.write_text("low 0\noom 0\noom_kill 0\n")
    monkeypatch.setattr(memory, "groups", lambda pid: [("", "job/step")])
    one = memory.Memory(os.getpid())
    one.look()
    assert one.limit == 1 << 20 and not one.wanted() and one.resident > 1 << 20
    (tmp_path / "vmstat").write_text("oom_kill 4\n")                # of another job on this host
    assert not one.wanted()
    events.write_text("low 0\noom 1\noom_kill 1\n")
    assert one.wanted() and "may have 1 MiB" in one.words()
    monkeypatch.setattr(memory, "groups", lambda pid: [])
    other = memory.Memory(os.getpid())
    assert not other.wanted() and "this host may have" in other.words()
    (tmp_path / "vmstat").write_text("oom_kill 5\n")
    assert other.wanted()
