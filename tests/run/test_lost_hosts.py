"""All ranks of a node are lost at once, and then the node itself, under Open MPI's ULFM: two hosts on one machine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hosts import Hosts, two_hosts, why_not
from launch import mpirun, send, tagged
from runs import SMALL, lines, record, write

from mpitrain.checkpoint.folders import candidates, step_of
from mpitrain.checkpoint.spare import keepers

pytestmark = pytest.mark.alone

OWN = """
import os
import signal

from mpitrain.train import Observer


class Faults(Observer):
    def before_step(self, step):
        if step == int(os.environ.get("KILL", "0")) and os.uname().nodename == os.environ["HOST"]:
            os.kill(os.getpid(), signal.SIGKILL)
"""
ULFM = ("--with-ft", "ulfm")
LIMIT = 5.0                                       # seconds from the loss of a host to the end of the last rank


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def command(folder: Path, out: str, *more: str) -> tuple[str, ...]:
    """Of a model so large that every rank has a slice of it."""
    (folder / "own.py").write_text(OWN)
    return ("-m", "mpitrain", "train", write(folder, SMALL), f"run.out={out}", "train.steps=30", "train.eval_every=15",
            "train.micro_batches=8", "train.reproducible=layout", "model.hidden=[256, 128]", *more)


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.promise("A2")
@pytest.mark.parametrize("host", ["left", "right"])
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_the_ranks_of_one_host_go_on_without_the_other_ones(hosts: Hosts, tmp_path: Path, host: str, sharding: str) -> None:
    quiet = mpirun(1, *command(tmp_path, "quiet"), cwd=tmp_path)
    assert quiet.rc == 0, quiet.err
    result = hosts.mpirun(4, *command(tmp_path, "run", "train.on_lost=go_on", "log.observers=own.py:Faults",
                                      f"comm.sharding={sharding}"), cwd=tmp_path, env={"KILL": "25", "HOST": host}, mpi_args=ULFM)
    assert result.rc == 0 and not result.error_lines, result.err
    found = record(tmp_path / "run")
    gone = [0, 1] if host == "left" else [2, 3]
    assert found["lost"] == [{"step": 24, "ranks": gone, "left": 2, "resumed": 20, "from": "memory"}]
    assert found["status"] == "done" and found["parameters_sha256"] == record(tmp_path / "quiet")["parameters_sha256"]
    keys = [(line["step"], line.get("split")) for line in lines(tmp_path / "run")]
    assert len(set(keys)) == len(keys) == 32


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.promise("A2")
def test_where_a_host_is_lost_with_its_daemon_the_job_ends_and_its_checkpoint_is_gone_on_from(hosts: Hosts,
                                                                                             tmp_path: Path) -> None:
    """Open MPI 5.0.11's mpirun ends with 0 then; run.json says that the run is not done."""
    arguments = command(tmp_path, "run", "train.on_lost=go_on", "checkpoint.every=10", "train.copy_every=5")
    job = hosts.launch(4, *arguments, "train.steps=100000", cwd=tmp_path, mpi_args=ULFM)
    job.wait_for("step 10  saved")
    for pid in tagged(job.tag):
        if host_of(pid) == "right":
            send(pid, signal.SIGKILL)
    lost = time.monotonic()
    result = job.finish(timeout=LIMIT)
    assert time.monotonic() - lost < LIMIT, result.err
    assert record(tmp_path / "run")["status"] == "running"
    done = step_of(candidates(tmp_path / "run/checkpoints")[0])
    again = mpirun(1, *arguments, "train.on_lost=stop", "--resume", "auto", f"train.steps={done + 5}", cwd=tmp_path)
    assert again.rc == 0 and f"resumed at step {done}" in again.out, again.err


def host_of(pid: int) -> str:
    said = subprocess.run(["nsenter", "--target", str(pid), "--uts", "hostname"], capture_output=True, text=True)
    return said.stdout.strip() if psutil.pid_exists(pid) else ""


def test_copies_lie_on_another_node_where_no_node_has_most_ranks() -> None:
    for hosts in ("aabb", "abab", "aabbcc", "abcabc", "aabbbc", "aab", "ab", "aaaabbc"):
        keeper = keepers(hosts)
        assert sorted(keeper) == list(range(len(hosts)))
        most = max(map(hosts.count, set(hosts)))
        beside = [rank for rank in range(len(hosts)) if hosts[keeper[rank]] == hosts[rank]]
        assert len(beside) == max(0, 2 * most - len(hosts)) and all(keeper[rank] != rank for rank in beside)
    assert keepers("aaa") == [1, 2, 0] and keepers("a") == [0]
