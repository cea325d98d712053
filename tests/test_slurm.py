"""The batch script and `srun` under the real Slurm of one node, where it is installed; `test_examples` has stand-ins for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from launch import ROOT, wait_until
from runs import SMALL, lines, record, steps, write

from mpitrain.checkpoint import folders, store

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = str(ROOT / "examples/slurm/train.sbatch")
LAYOUT = SMALL.replace("eval_every = 25", 'eval_every = 25\nreproducible = "layout"\nmicro_batches = 4\nstop_before = "never"')
GATE = """
import os, signal, time
from mpitrain.train.observers.observer import Observer

class Gate(Observer):
    "In the first of a job's starts, rank 0 waits before step 30 until it is asked to stop."
    def begin(self, run):
        self.rank = run.rank

    def before_step(self, step):
        asked = signal.getsignal(signal.SIGUSR1).__self__
        while step == 30 and self.rank == 0 and "SLURM_RESTART_COUNT" not in os.environ and not asked.asked:
            time.sleep(0.01)

def gate():
    return Gate()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    if why := slurm.missing():
        pytest.skip(why)
    with slurm.Cluster() as found:
        yield found


@pytest.fixture(scope="module")
def whole(cluster: slurm.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that the script has started and Slurm has left alone."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, LAYOUT)
    about = cluster.end(cluster.submit(folder, "--time=5", SCRIPT, "run.toml", "run.out=run"))
    said = (folder / "out.txt").read_text()
    assert (about["JobState"], about["ExitCode"], about["Restarts"]) == ("COMPLETED", "0:0", "0"), said
    assert record(folder / "run")["status"] == "done" and "2 ranks" in said
    return folder / "run"


@pytest.mark.promise("E1", "E5")
def test_a_job_whose_time_ends_is_saved_requeued_and_goes_on_to_the_hash_of_one_that_had_time(
        cluster: slurm.Cluster, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "gate.py").write_text(GATE)
    job = cluster.submit(tmp_path, "--time=1", "--signal=B:USR1@20", SCRIPT, str(write(tmp_path, LAYOUT)), "run.out=run",
                         'log.observers=["gate.py:gate"]')
    about = cluster.end(job)
    said = (tmp_path / "out.txt").read_text()
    # Slurm may look at the clock, and send the signal, 30 s early, so perhaps to a later start too.
    assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0") and int(about["Restarts"]) >= 1, said
    assert "E_STOPPED" in said and "resumed at step 30" in said
    assert record(tmp_path / "run")["parameters_sha256"] == record(whole)["parameters_sha256"]
    assert [line["step"] for line in steps(tmp_path / "run")] == [line["step"] for line in steps(whole)]


@pytest.mark.promise("E5")
def test_a_job_that_is_cancelled_leaves_its_last_checkpoint_and_no_process(cluster: slurm.Cluster, tmp_path: Path) -> None:
    write(tmp_path, LAYOUT)
    out = tmp_path / "out.txt"
    job = cluster.submit(tmp_path, "--time=5", SCRIPT, "run.toml", "run.out=run", "train.steps=1000000", "checkpoint.every=10",
                         "train.eval_every=0")
    cluster.wait(lambda: out.exists() and "step 20  saved" in out.read_text(), 60, "saved step 20")
    assert cluster.processes()                                            # the control: the tag finds those that run
    cluster.run("scancel", job)
    assert cluster.end(job)["JobState"] == "CANCELLED"
    wait_until(lambda: not cluster.processes())
    assert cluster.processes() == []
    found = store.latest(tmp_path / "run/checkpoints")
    found.verify()
    assert found.step >= 20 and lines(tmp_path / "run")[-1]["step"] >= found.step
    assert folders.candidates(tmp_path / "run/checkpoints")


def srun(cluster: slurm.Cluster, folder: Path, kind: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = ["srun", "--ntasks=2", f"--mpi={kind}", sys.executable, "-P", "-m", "mpitrain", "train", str(write(folder, LAYOUT)),
               "run.out=run", *overrides]
    return subprocess.run(command, env=cluster.environment, cwd=folder, text=True, capture_output=True, timeout=120)


def test_srun_with_pmix_trains_to_the_same_hash(cluster: slurm.Cluster, whole: Path, tmp_path: Path) -> None:
    result = srun(cluster, tmp_path, "pmix")
    if "can not load PMIx library" in result.stderr:
        pytest.skip("srun finds no libpmix.so: on Debian, apt-get install libpmix-dev")
    assert result.returncode == 0 and "2 ranks" in result.stdout, result.stderr
    assert record(tmp_path / "run")["parameters_sha256"] == record(whole)["parameters_sha256"]


@pytest.mark.parametrize("kind", ["none", "pmi2"])
def test_srun_without_the_pmi_of_the_library_is_refused_in_one_line(cluster: slurm.Cluster, tmp_path: Path, kind: str) -> None:
    result = srun(cluster, tmp_path, kind)
    said = [line for line in result.stderr.splitlines() if line.startswith("mpitrain:")]
    assert result.returncode == 64 and len(said) == 1 and not (tmp_path / "run").exists(), result.stderr
    assert "srun started 2 processes, but each is a job of its own" in said[0] and "srun --mpi=pmix" in said[0]


@pytest.mark.parametrize("kind", ["none", "pmi2", "pmix"])
def test_a_wrong_configuration_is_one_line_of_the_job_whether_srun_connects_its_processes_or_not(
        cluster: slurm.Cluster, tmp_path: Path, kind: str) -> None:
    result = srun(cluster, tmp_path, kind, "train.steps=many")
    if "can not load PMIx library" in result.stderr:
        pytest.skip("srun finds no libpmix.so: on Debian, apt-get install libpmix-dev")
    said = [line for line in result.stderr.splitlines() if line.startswith("mpitrain:")]
    assert result.returncode == 78 and len(said) == 1 and "E_CONFIG rank=0/2" in said[0], result.stderr
