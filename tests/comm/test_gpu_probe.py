"""Whether MPI takes memory of a device is tried out by a process that may crash: here by real ones, with the stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakegpu import xp

from mpitrain.backend import Device
from mpitrain.comm.messages import gpu_probe
from mpitrain.errors import ConfigError
from mpitrain.parallel.policies.choose import hand_over

PREPARED = "import fakegpu; fakegpu.instead_of_cupy(); "


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(gpu_probe, "CHILD", PREPARED + gpu_probe.CHILD)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return monkeypatch


def test_an_mpi_that_takes_the_memory_is_said_to_by_saying_nothing(child: pytest.MonkeyPatch) -> None:
    """Also in a job of another launcher, of which the child must not become a rank."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMIX_NAMESPACE", "PRTE_LAUNCHED", "PMI_RANK"):
        child.setenv(name, "7")
    assert gpu_probe.refusal(0) == ""


@pytest.mark.parametrize(("done", "said"), [
    ("import sys; print('no such device'); sys.exit(3); ", "ended with 3: no such device"),
    ("import sys; sys.exit(0); ", "ended with 0"),
    ("import time; time.sleep(60); ", "had not ended after 0.2 s")])
def test_a_process_that_crashes_fails_or_hangs_says_why_not(monkeypatch: pytest.MonkeyPatch, done: str, said: str) -> None:
    monkeypatch.setattr(gpu_probe, "CHILD", done)
    limit_s = 0.2 if "sleep" in done else None
    assert gpu_probe.refusal(0, limit_s) == f"a process that sent some to itself {said}"


def test_where_no_process_can_be_started_the_others_are_told_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    monkeypatch.setattr(gpu_probe.subprocess, "Popen", full)
    assert gpu_probe.refusal(0) == "no process could be started that tries ([Errno 11] Resource temporarily unavailable)"


def test_an_mpi_that_reads_the_address_as_one_of_the_host_crashes_a_child_and_nobody_else(child: pytest.MonkeyPatch) -> None:
    nowhere = "gpu_probe.address = lambda x: 4096"                               # no memory of the host is mapped there
    child.setattr(gpu_probe, "CHILD", f"{PREPARED}from mpitrain.comm.messages import gpu_probe; {nowhere}; gpu_probe.main()")
    assert gpu_probe.refusal(0) == "a process that sent some to itself was ended by SIGSEGV"


def test_messages_that_come_changed_are_seen(child: pytest.MonkeyPatch) -> None:
    elsewhere = "gpu_probe.address = lambda x, kept=[]: kept.append(x.copy()) or kept[-1].data.ptr"       # MPI has a copy
    child.setattr(gpu_probe, "CHILD", f"{PREPARED}from mpitrain.comm.messages import gpu_probe; {elsewhere}; gpu_probe.main()")
    assert gpu_probe.refusal(0) == "a process that sent some to itself ended with 1: what came was not what was sent"


def test_the_child_is_no_rank_of_the_job_and_has_the_users_transports() -> None:
    has = gpu_probe.alone({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PRTE_X": "1", "SLURM_PROCID": "1", "PATH": "/bin",
                           "OMPI_MCA_pml": "ucx", "OMPI_MCA_ess_base_jobid": "4"})
    assert has == {"PATH": "/bin", "OMPI_MCA_pml": "ucx", "OMPI_MCA_btl": "self"}


def test_where_one_rank_is_refused_all_go_by_way_of_the_host_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "refusal", lambda number: "")
    for refused, insist in (["", ""], False), (["", "it crashed"], False), (["", "it crashed"], True):
        channel: Any = SimpleNamespace(size=2, gather_objects=lambda own, all_=refused: all_, notes=[], device_buffers=False)
        try:
            hand_over(channel, Device("gpu", xp), insist=insist)
        except ConfigError as error:
            assert insist and error.message == (
                'comm.device_buffers = "on", but MPI takes no addresses of GPU memory on rank 1: it crashed; set it "off", or '
                "use an MPI that was built with CUDA")
        else:
            assert not insist and channel.device_buffers == (refused == ["", ""])
            assert channel.notes == ([] if channel.device_buffers else [
                'comm.device_buffers = "auto": gradients go by way of host memory, since MPI takes no addresses of GPU memory on '
                "rank 1: it crashed"])
