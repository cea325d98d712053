"""The limits of a host are as before a run, whatever ended that: jobs of two ranks on a tree of files."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launch import Job, Result, is_guardian, is_open_mpi, launch, mpirun, send, tagged
from runs import SMALL
from studies import STUDY
from sys_trees import CLOCK, WATTS, settings, sys_tree

from mpitrain.energy import guardian

OWN = '''
import os, signal
from pathlib import Path
from mpitrain.train import Observer

class Fault(Observer):
    """At steps 3 and 40 it says what the limit is then; it ends its rank as FAULT says."""

    def begin(self, run):
        self.rank = run.rank

    def after_step(self, step, fields, seconds):
        if step in (3, 40):
            print("limit", Path("sys/class/powercap/intel-rapl:1/constraint_0_power_limit_uw").read_text().strip(), flush=True)
            if os.environ["FAULT"] == f"error {self.rank}":
                raise ValueError("on purpose")
            if os.environ["FAULT"] in (f"kill {self.rank}", "kill all") and "WENT_ON" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            os.environ["WENT_ON"] = "1"                      # a rank that is left is rank 0 of the rest
'''
LIMITED = ("energy.root=sys/class/powercap", "energy.cap_watts=120", "energy.clock_mhz=1500")
SET = {"intel-rapl:0": 120_000_000, "intel-rapl:1": 120_000_000} | dict.fromkeys(("policy0", "policy2", "policy10"), 1_500_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sys_tree(tmp_path / "sys")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(SMALL + 'observers = ["own.py:Fault"]\n')
    return tmp_path


def start(folder: Path, *overrides: str, fault: str = "") -> Job:
    return launch(2, "-m", "mpitrain", "train", "run.toml", "--overwrite", *LIMITED, *overrides, cwd=folder, env={"FAULT": fault})


def before(folder: Path) -> bool:
    """Whether all is as before, and no record of it is left."""
    root = folder / "sys/class/powercap"
    return all(value == (CLOCK if name.startswith("policy") else WATTS) for name, value in settings(root).items()) \
        and not guardian.record_of(root).exists()


def ended(job: Job, folder: Path) -> Result:
    """The end of a job and of all that it has started; its limits held."""
    result = job.finish()
    assert "limit 120000000" in result.out
    assert before(folder)
    return result


def test_after_sigterm_all_is_as_before(folder: Path) -> None:
    job = start(folder, "train.steps=100000")
    job.wait_for("limit 120000000")
    job.signal(signal.SIGTERM)
    assert ended(job, folder).rc != 0


@pytest.mark.parametrize("fault", ["kill 1", "error 1", pytest.param("kill 0", marks=pytest.mark.slow),
                                   pytest.param("kill all", marks=pytest.mark.slow),
                                   pytest.param("error 0", marks=pytest.mark.slow)])
def test_after_the_end_of_a_rank_all_is_as_before(folder: Path, fault: str) -> None:
    assert ended(start(folder, fault=fault), folder).rc != 0


def test_what_a_killed_guardian_leaves_the_next_run_puts_back(folder: Path) -> None:
    """Everybody is killed at once, as by a batch system. The next run has other limits; those end with it."""
    job = start(folder, "train.steps=100000")
    job.wait_for("limit 120000000")
    for pid in sorted(tagged(job.tag), key=lambda pid: not is_guardian(pid)):
        send(pid, signal.SIGKILL)
    job.finish()
    root = folder / "sys/class/powercap"
    assert {name: settings(root)[name] for name in SET} == SET
    assert guardian.record_of(root).exists()
    done = mpirun(2, "-m", "mpitrain", "train", "run.toml", "--overwrite", "train.steps=4", LIMITED[0], "energy.cap_watts=90",
                  cwd=folder, env={"FAULT": ""})
    assert done.rc == 0, done.err
    assert "put back the limits that a killed run" in done.out and "limit 90000000" in done.out
    assert before(folder)
    assert len(json.loads((folder / "runs/run/run.json").read_text())["limits"]) == 3


@pytest.mark.slow
@pytest.mark.skipif(not is_open_mpi(), reason="Open MPI, whose mpirun goes on where a rank is lost")
def test_ranks_that_go_on_without_the_one_that_has_set_the_limits_keep_them(folder: Path) -> None:
    job = launch(3, "-m", "mpitrain", "train", "run.toml", *LIMITED, "train.on_lost=go_on", "train.steps=60", cwd=folder,
                 env={"FAULT": "kill 0"}, mpi_args=("--with-ft", "ulfm"))
    result = ended(job, folder)
    assert result.rc == 0, result.err
    assert "E_PEER" in result.err or "lost" in result.out + result.err
    assert result.out.count("limit 120000000") >= 4 and "limit 200000000" not in result.out      # at step 40, too


@pytest.mark.slow
def test_a_run_without_limits_puts_back_what_a_killed_guardian_has_left(folder: Path) -> None:
    job = start(folder, "train.steps=100000")
    job.wait_for("limit 120000000")
    for pid in sorted(tagged(job.tag), key=lambda pid: not is_guardian(pid)):
        send(pid, signal.SIGKILL)
    job.finish()
    done = mpirun(1, "-m", "mpitrain", "train", "run.toml", "--overwrite", "train.steps=4", cwd=folder, env={"FAULT": ""})
    assert done.rc == 0 and "put back the limits that a killed run" in done.out
    assert before(folder)


def test_a_limit_that_the_hardware_cannot_have_is_refused_before_training(folder: Path) -> None:
    refused = mpirun(2, "-m", "mpitrain", "train", "run.toml", LIMITED[0], "energy.cap_watts=251", cwd=folder, env={"FAULT": ""})
    assert refused.rc == 78 and len(refused.error_lines) == 1
    assert "energy.cap_watts = 251 cannot be set: the power limit of package-0 takes at most 250 W" in refused.error_lines[0]
    assert before(folder) and not (folder / "runs").exists()


@pytest.mark.slow
def test_all_trials_of_a_study_run_with_its_limits(folder: Path) -> None:
    (folder / "study.toml").write_text(STUDY.replace("trials = 9", "trials = 3") + '[log]\nobservers = ["own.py:Fault"]\n')
    done = mpirun(2, "-m", "mpitrain", "search", "study.toml", "run.out=study", *LIMITED, cwd=folder, env={"FAULT": ""})
    assert done.rc == 0, done.err
    assert done.out.count("limit 120000000") >= 3 and "limit 200000000" not in done.out and before(folder)
    limits = [json.loads(path.read_text())["limits"] for path in folder.glob("study/trials/*/run.json")]
    assert len(limits) == 3 and all("power limit of package-0 200 W -> 120 W" in said[0] for said in limits)
