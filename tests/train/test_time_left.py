"""A run stops by itself while there is time to save, and a lone run that SIGTERM ends says what is kept."""

from __future__ import annotations

import signal
import time
from datetime import datetime, timedelta

import pytest
from launch import clean_environment, send
from runs import lines, record, start, train, without_times, write

from mpitrain.checkpoint import store
from mpitrain.comm.job.signals import StopRequest
from mpitrain.config import Config, changed
from mpitrain.config.values import check_values
from mpitrain.errors import ConfigError
from mpitrain.train.intervals import Plan
from mpitrain.train.observers.observer import Watched
from mpitrain.train.observers.time_left import LOOKS, MARGIN, SAVES, TimeLeft, end_of_time

pytestmark = pytest.mark.alone


def stops_at(end: float, step_s: float, save_s: float) -> int | None:
    """The step before which a run asks to stop, whose steps and saves take so long; the clock is the test's."""
    stop, now, told = StopRequest(), [0.0], []
    left = TimeLeft(1e9 + end, stop, lambda: save_s, clock=lambda: now[0], now=lambda: 1e9)
    left.begin(Watched(0, 1, 0, Plan(1000, 1, 1, 0, 0, False, 1), None, told.append))
    for step in range(1, 1000):
        left.before_step(step)
        if stop.asked:
            assert len(told) == 1 and told[0].startswith(f"step {step}  the time of this job ends at")
            return step
        now[0] += step_s
    return None


@pytest.mark.promise("E6")
@pytest.mark.parametrize(("end", "step_s", "save_s"), [(100.0, 1.0, 0.0), (100.0, 1.0, 10.0), (500.0, 7.0, 2.5)])
def test_enough_time_is_kept_for_three_saves_and_the_present_step(end: float, step_s: float, save_s: float) -> None:
    step = stops_at(end, step_s, save_s)
    assert step is not None
    left = end - (step - 1) * step_s                                        # seconds, when it asked
    needed = SAVES * save_s + LOOKS * step_s + MARGIN
    assert needed - step_s <= left < needed


def test_a_run_that_ends_before_is_not_stopped() -> None:
    assert stops_at(5000.0, 1.0, 10.0) is None


def test_the_end_is_the_keys_then_slurms_or_none() -> None:
    slurm = {"SLURM_JOB_END_TIME": "1800000000"}
    assert end_of_time("", slurm) == 1.8e9 and end_of_time("", {}) is None and end_of_time("never", slurm) is None
    assert end_of_time("2100-01-01T00:00:00+00:00", slurm) == 4102444800.0
    with pytest.raises(ConfigError, match=r'train.stop_before = "2020-05-05" has passed: set a later time, or "never"'):
        end_of_time("2020-05-05", {})
    with pytest.raises(ConfigError, match='train.stop_before must be a time such as .*, or "never", found "soon"'):
        check_values(changed(Config(), train={"stop_before": "soon", "steps": 1}))


@pytest.mark.promise("E6")
def test_a_job_that_is_near_its_end_saves_exits_85_and_goes_on_to_the_bits_of_one_that_had_time(tmp_path) -> None:
    config = write(tmp_path)
    later = (datetime.now() + timedelta(days=1)).isoformat(timespec="seconds")
    whole = train(2, config, "run.out=whole", f"train.stop_before={later}")
    assert whole.rc == 0, whole.err                                         # the control: the same with time enough
    soon = {"SLURM_JOB_END_TIME": str(int(time.time()) + int(MARGIN) - 1)}
    stopped = train(2, config, "run.out=cut", env=soon)
    assert stopped.rc == 85 and "E_STOPPED" in stopped.error_lines[0], stopped.err
    assert "the time of this job ends at" in stopped.out and store.latest(tmp_path / "cut/checkpoints").step == 1
    resumed = train(2, config, "run.out=cut", "--resume", "train.stop_before=never", env=soon)
    assert resumed.rc == 0, resumed.err
    assert record(tmp_path / "cut")["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))


@pytest.mark.promise("E2")
def test_sigterm_to_a_lone_run_says_which_checkpoint_stands_and_it_does(tmp_path) -> None:
    import subprocess
    import sys
    config = write(tmp_path)
    command = [sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a", "train.steps=100000", "checkpoint.every=10",
               "train.eval_every=0"]
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 20  saved" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    (line,) = [line for line in err.splitlines() if line.startswith("mpitrain:")]
    assert process.returncode == 143 and "E_TERMINATED rank=0/1" in line and "step=" in line
    kept = store.latest(tmp_path / "a/checkpoints").step
    assert kept >= 20 and f"the checkpoint of step {kept} stands" in line and "SIGUSR1" in line


@pytest.mark.skipif("__import__('launch').is_open_mpi()", reason="Open MPI kills ranks after SIGTERM: for MPICH and Intel MPI")
@pytest.mark.promise("E2")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("killed", [False, True])
def test_under_launchers_that_wait_sigterm_saves_and_a_kill_then_leaves_a_whole_checkpoint(tmp_path, n, killed) -> None:
    job = start(n, write(tmp_path), "run.out=a", "train.steps=100000", "checkpoint.every=10", "train.eval_every=0")
    job.wait_for("step 20  saved")
    ranks = job.ranks()
    job.signal(signal.SIGTERM)
    if killed:
        for rank in ranks:
            send(rank, signal.SIGKILL)
    result = job.finish(timeout=20)
    kept = store.latest(tmp_path / "a/checkpoints").step
    assert kept >= 20
    if not killed:
        assert result.rc == 85 and len(result.error_lines) == 1 and f"E_STOPPED rank=0/{n}" in result.err, result.err
        assert f"step={kept}" in result.error_lines[0] and lines(tmp_path / "a")[-1]["step"] <= kept


def test_sigusr1_still_stops_a_run_that_listens_for_both(tmp_path) -> None:
    job = start(1, write(tmp_path), "run.out=a", "train.steps=100000")
    job.wait_for("step 20/")
    job.signal(signal.SIGUSR1)
    assert job.finish().rc == 85
