"""`mpitrain supervise` starts a job again where a rank was lost, and only there."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import POLL, Job, Result, clean_environment, find_mpirun, tagged
from runs import SMALL, lines, record, steps, train, without_times, write

from mpitrain.checkpoint import folders
from mpitrain.verbs import supervise

LAYOUT = SMALL.replace("eval_every = 25", 'eval_every = 0\nreproducible = "layout"\nmicro_batches = 4') + \
    'observers = ["kill.py:kill"]\n[checkpoint]\nevery = 20\nasynchronous = false\n'
KILL = """
import json, os, signal
from pathlib import Path
from mpitrain.train.observers.observer import Observer

class Kill(Observer):
    def begin(self, run):
        self.rank = run.rank

    def before_step(self, step):
        left = json.loads(Path("kills").read_text())
        if self.rank == 1 and left and left[0] == step:
            Path("kills").write_text(json.dumps(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

def kill():
    return Kill()
"""
ALL_DIE = """
import os, pathlib
from mpitrain.train import Observer
class End(Observer):
    def begin(self, run): self.mark = pathlib.Path(f"died-{run.rank}")
    def before_step(self, step):
        if step == 7 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), 9)
"""


def write_with_kills(folder: Path, *kills: int) -> Path:
    """A run in layout mode whose rank 1 is killed before each of the steps in turn."""
    (folder / "kill.py").write_text(KILL)
    (folder / "kills").write_text(json.dumps(kills))
    return write(folder, LAYOUT)


def start(folder: Path, restarts: int, *job: str) -> Job:
    words = [sys.executable, "-m", "mpitrain", "supervise", "--restarts", str(restarts), "--", *job]
    return Job(words, clean_environment(), folder)


def supervised(config: Path, restarts: int, *arguments: str) -> Result:
    return start(config.parent, restarts, find_mpirun(), "-n", "2", sys.executable, "-m", "mpitrain", "train", str(config),
                 *arguments).finish()


def told(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("supervise: ")]


@pytest.mark.promise("A2", "B7")
def test_a_job_that_loses_ranks_goes_on_to_the_hash_of_one_that_lost_none(tmp_path: Path) -> None:
    config = write_with_kills(tmp_path, 7, 25)
    again = supervised(config, 1, "run.out=again")
    assert again.rc == 0, again.err
    assert [line.partition("it goes on ")[2] for line in told(again)] == [
        "from the start (1 of 1 without a new checkpoint)", "from step 20 (1 of 1 without a new checkpoint)"]
    found = record(tmp_path / "again")
    assert [(entry["exit_code"], entry["step"]) for entry in found["restarts"]] == [(137, 0), (137, 20)]
    whole = train(2, config, "run.out=whole")                             # the control: the list of kills is empty now
    assert whole.rc == 0 and "restarts" not in record(tmp_path / "whole"), whole.err
    assert found["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]
    assert without_times(lines(tmp_path / "again")) == without_times(lines(tmp_path / "whole"))


@pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: its mpirun --with-ft ulfm")
def test_a_job_that_loses_all_ranks_and_ends_with_0_is_not_taken_for_done(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(ALL_DIE)
    config = write(tmp_path, SMALL + 'observers = ["end.py:End"]\n')
    command = [find_mpirun(), "--with-ft", "ulfm", "-n", "2", sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a",
               "train.on_lost=go_on"]
    result = Job([sys.executable, "-m", "mpitrain", "supervise", "--restarts", "1", "--", *command], clean_environment(),
                 tmp_path).finish()
    assert result.rc == 0 and result.err.count("supervise: restart 1: ") == 1, result.err     # mpirun has left a line open
    assert record(tmp_path / "a")["status"] == "done"


def test_a_job_that_dies_at_the_same_step_each_time_is_given_up_with_its_exit_code(tmp_path: Path) -> None:
    result = supervised(write_with_kills(tmp_path, 25, 25, 25), 1, "run.out=a")
    assert result.rc == 137 and len(told(result)) == 2, result.err
    assert "no restart" in told(result)[1] and "1 in a row have added no checkpoint (--restarts 1)" in told(result)[1]
    assert json.loads((tmp_path / "kills").read_text()) == [25] and len(record(tmp_path / "a")["restarts"]) == 1


@pytest.mark.parametrize(("arguments", "code"), [(("train.steps=many",), 78), (("--resume",), 73), (("--wrong",), 64),
                                                 (("optimizer.lr=1e30",), 79)])
def test_what_would_come_again_is_not_tried_again(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    result = supervised(write_with_kills(tmp_path), 3, "run.out=a", *arguments)
    assert result.rc == code and len(result.error_lines) == 1 and told(result) == [], result.err


def test_the_runs_of_others_are_neither_continued_nor_touched(tmp_path: Path) -> None:
    config = write_with_kills(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=20").rc == 0
    before = (tmp_path / "a/run.json").read_bytes()
    (tmp_path / "dies.sh").write_text('echo "$@" >> commands; kill -9 $$')          # before the run takes its folder
    job = ["sh", "dies.sh", "mpitrain", "train", str(config), "run.out=a"]
    assert start(tmp_path, 2, *job).finish().rc == 137
    assert start(tmp_path, 1, *job, "--overwrite").finish().rc == 137
    assert start(tmp_path, 1, *job[:-1], "run.out=new", "--overwrite").finish().rc == 137
    words = [line.removeprefix(f"mpitrain train {config} ") for line in (tmp_path / "commands").read_text().splitlines()]
    assert words == [*["run.out=a"] * 3, *["run.out=a --overwrite"] * 2, "run.out=new --overwrite", "run.out=new --resume auto"]
    assert (tmp_path / "a/run.json").read_bytes() == before and not (tmp_path / "new").exists()


@pytest.mark.promise("E1")
def test_the_job_of_a_killed_supervisor_saves_and_stops(tmp_path: Path) -> None:
    config = write_with_kills(tmp_path)
    job = start(tmp_path, 1, find_mpirun(), "-n", "2", sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a",
                "train.steps=1000000")
    job.wait_for("step 1/")
    job.process.kill()
    deadline = time.monotonic() + 30
    while tagged(job.tag) and time.monotonic() < deadline:
        time.sleep(POLL)
    assert job.finish().rc == -signal.SIGKILL                             # nobody is left
    kept = max(map(folders.step_of, folders.candidates(tmp_path / "a/checkpoints")))
    assert kept == steps(tmp_path / "a")[-1]["step"]


@pytest.mark.promise("E1", "E2")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 85), (signal.SIGTERM, 85), (signal.SIGINT, None)])
def test_signals_are_passed_to_the_job_which_is_not_started_again(tmp_path: Path, number: int, code: int | None) -> None:
    config = write_with_kills(tmp_path)
    job = start(tmp_path, 3, find_mpirun(), "-n", "2", sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a",
                "train.steps=100000", "log.progress_s=0")
    job.wait_for("step 5/")
    job.signal(number)
    result = job.finish(20)
    assert result.rc == code if code else result.rc not in (0, 85), result.err
    kept = max(map(folders.step_of, folders.candidates(tmp_path / "a/checkpoints")), default=None)
    ended = f"supervise: the job was ended, with {result.rc}; " + (f"the checkpoint of step {kept} stands" if kept else
                                                                 "it has no checkpoint")
    asked = "supervise: SIGTERM: the run is asked to save and stop; a second one kills it"
    assert told(result) == {signal.SIGUSR1: [], signal.SIGTERM: [asked, ended], signal.SIGINT: [ended]}[number]
    assert code is None or (kept == steps(tmp_path / "a")[-1]["step"] and "E_STOPPED" in result.error_lines[0])


COUNT = 'n=$(($(cat n 2>/dev/null || echo 0) + 1)); echo $n > n; '


@pytest.mark.parametrize(("script", "number", "code"), [
    ("trap 'exit 85' USR1", signal.SIGUSR1, 85), ("trap 'kill -9 $$' USR1", signal.SIGUSR1, 138), ("", signal.SIGUSR1, 138),
    ("trap 'exit 137' INT", signal.SIGINT, 137), ("trap 'exit 137' USR1", signal.SIGTERM, 137), ("", signal.SIGHUP, 129)])
def test_a_job_that_was_told_to_end_is_not_started_again(tmp_path: Path, script: str, number: int, code: int) -> None:
    """SIGUSR1 that meets a lost rank is exit code 138, which job scripts start again."""
    (tmp_path / "job.sh").write_text(COUNT + script + "\necho ready; while :; do sleep 0.01; done")
    job = start(tmp_path, 3, "sh", "job.sh", "mpitrain", "train", str(write(tmp_path)))
    job.wait_for("ready")
    job.signal(number)
    assert job.finish(20).rc == code and (tmp_path / "n").read_text() == "1\n"


def test_the_second_ctrl_c_kills_a_job_that_takes_its_time(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("trap 'echo first' INT\necho ready; while :; do sleep 0.01; done")
    job = start(tmp_path, 3, "sh", "job.sh", "mpitrain", "train", str(write(tmp_path)))
    job.wait_for("ready")
    job.signal(signal.SIGINT)
    job.wait_for("first")
    job.signal(signal.SIGTERM)
    assert job.finish(20).rc == 137


def test_the_end_of_a_job_is_seen_also_where_the_caller_ignores_ended_children(tmp_path: Path) -> None:
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    job = ["sh", "-c", "exit 66", "mpitrain", "train", str(write(tmp_path))]
    words = [sys.executable, "-c", ignoring, sys.executable, "-m", "mpitrain", "supervise", "--", *job]
    assert Job(words, clean_environment(), tmp_path).finish(20).rc == 66


def test_a_folder_that_cannot_be_held_does_not_change_the_exit_code_of_its_job(tmp_path: Path) -> None:
    """The lock file is a folder, as good as a file that may not be opened."""
    (tmp_path / "a/lock").mkdir(parents=True)
    result = start(tmp_path, 1, "sh", "-c", "exit 0", "mpitrain", "train", str(write(tmp_path)), "run.out=a").finish(20)
    assert result.rc == 0 and "mpitrain: E_" not in result.err, result.err


@pytest.mark.parametrize(("words", "said"), [
    (("--restarts", "0", "--", "mpirun"), "--restarts: must be a whole number from 1 on, found '0'"),
    (("--restarts", "many", "--", "mpirun"), "must be a whole number from 1 on, found 'many'"),
    ((), "supervise needs the command of one training job, found nothing; for instance: python -m mpitrain supervise"),
    (("--", "mpirun", "-n", "2", "python", "-m", "mpitrain", "bench", "allreduce"), "found mpirun -n 2 python -m mpitrain bench"),
    (("--", "mpitrain", "train", ":", "mpitrain", "train"), "the command of one training job"),
    (("--", "no-such-launcher", "mpitrain", "train"), "supervise cannot start no-such-launcher: No such file or directory"),
])
def test_a_command_that_cannot_be_supervised_is_refused_in_a_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = Job([sys.executable, "-m", "mpitrain", "supervise", *words], clean_environment(), tmp_path).finish()
    assert result.rc == 64 and len(result.error_lines) == 1 and said in result.error_lines[0], result.err


@pytest.mark.slow
def test_the_launcher_does_not_start_the_supervisor(tmp_path: Path) -> None:
    environment = {**clean_environment(), "PMI_RANK": "0", "PMI_SIZE": "2"}
    result = Job([sys.executable, "-m", "mpitrain", "supervise", "--", "mpitrain", "train"], environment, tmp_path).finish()
    assert result.rc == 64 and "no launcher starts it" in result.err


def test_the_supervisor_loads_neither_mpi_nor_numpy() -> None:
    program = ("import sys, mpitrain.cli; from mpitrain.verbs import supervise; supervise.supervised(['mpitrain', 'train']); "
               "assert not {'mpi4py', 'numpy', 'h5py'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, env=clean_environment())


def test_exit_codes_of_faults_and_of_requests_are_none_of_a_lost_rank() -> None:
    assert not {0, 1, 2, 64, 65, 66, 70, 71, 73, 74, 76, 77, 78, 79, 85, 126, 127, 130, 138, 143} & supervise.LOST.keys()
    assert {75, 255, *itertools.chain((6, 7, 9, 11), (134, 135, 137, 139))} == supervise.LOST.keys()
