"""The examples run: a few steps of each on 2 ranks, and the Slurm script with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, Job, Result, clean_environment, find_mpirun, mpirun

DATA = ROOT.parent / "shared/data"                # real inputs, where somebody has put them
FEW = ("train.steps=20", "optimizer.warmup_steps=5", "train.eval_every=20", "log.every=1")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy to work in, so that what an example writes is not left in the checkout."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for pattern in ("*.toml", "*.py"):
        for path in (ROOT / "examples").glob(pattern):
            shutil.copy(path, folder)
    shutil.copytree(ROOT / "examples/slurm", folder / "slurm")
    return folder


def train(examples: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a short run on 2 ranks."""
    ok(mpirun(2, "-m", "mpitrain", "train", f"examples/{name}.toml", "run.out=run", *FEW, *overrides, cwd=examples.parent))
    return [json.loads(line) for line in (examples.parent / "run/metrics.jsonl").read_text().splitlines()]


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def command(folder: Path, *words: str) -> None:
    ok(Job([sys.executable, *words], clean_environment(), folder).finish())


def real(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there: put the real input in that folder")
    return path


def loss_falls(lines: list[dict[str, Any]], to: float) -> bool:
    """Whether the mean loss of the last five steps is below `to` times that of the first."""
    losses = [line["loss"] for line in lines if "split" not in line]
    assert len(losses) >= 12 and "split" in lines[-1]
    return sum(losses[-5:]) / 5 < to * losses[0]


def test_digits_learn(examples: Path) -> None:
    assert loss_falls(train(examples, "digits"), 0.8)


def test_a_file_that_a_simulation_wrote_trains_where_it_lies(examples: Path) -> None:
    command(examples.parent, "examples/simulation.py", "examples/simulation.h5")
    before = os.stat(examples / "simulation.h5")
    assert loss_falls(train(examples, "simulation"), 0.8)
    after = os.stat(examples / "simulation.h5")
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert {path.name for path in examples.iterdir() if path.suffix == ".h5"} == {"simulation.h5"}


def test_mnist_learns_from_its_own_files(examples: Path) -> None:
    images = real("t10k-images-idx3-ubyte.gz")
    command(examples.parent, "-m", "mpitrain", "data", "import", "idx", str(images), "--out", "examples/mnist")
    assert loss_falls(train(examples, "mnist", "train.steps=40", "train.eval_every=40"), 0.8)


def test_shakespeare_learns_from_the_text(examples: Path) -> None:
    text = real("tinyshakespeare.txt")
    command(examples.parent, "-m", "mpitrain", "data", "import", "text", str(text), "--out", "examples/shakespeare")
    assert loss_falls(train(examples, "shakespeare", "data.validation=tail:0.001", "train.steps=12"), 0.95)


def test_the_python_script_is_short_and_learns_the_digits(examples: Path) -> None:
    script = examples / "python_api.py"
    assert len(script.read_text().splitlines()) < 40
    result = ok(mpirun(2, script, cwd=examples.parent))
    words = result.out.splitlines()[-1].split()
    assert words[:2] == ["validation", "accuracy"] and float(words[2]) > 0.9


# ---- the Slurm script -----------------------------------------------------------------------------------------------

def stand_ins(folder: Path) -> dict[str, str]:
    """An environment as inside a job of Slurm: an `mpirun` that needs no -n, a `scontrol` that writes down its arguments."""
    commands = folder / ".venv/bin"
    commands.mkdir(parents=True)
    scripts = {"mpirun": f'shift 2\nexec {find_mpirun()} -n 2 "$@"', "scontrol": f'echo "$@" >> {folder}/scontrol.log',
               "python": f'exec {sys.executable} "$@" run.out=run train.epochs="${{EPOCHS:-40}}"'}
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    (commands / "activate").write_text(f'PATH="{commands}:$PATH"\n')
    return {**clean_environment(), "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "1"}


def batch_job(examples: Path, environment: dict[str, str], *arguments: str) -> Job:
    return Job(["bash", str(examples / "slurm/train.sbatch"), "examples/digits.toml", *arguments], environment, examples.parent)


@pytest.mark.promise("E5")
def test_the_slurm_script_saves_requeues_itself_and_goes_on(examples: Path) -> None:
    environment = stand_ins(examples.parent)
    job = batch_job(examples, environment, "log.every=1", "log.progress_s=0")
    job.wait_for("step 5/")
    job.signal(signal.SIGUSR1)                    # to the batch script alone, as --signal=B:USR1@120 does
    stopped = job.finish()
    assert stopped.rc == 85, stopped.out + stopped.err
    assert len(stopped.error_lines) == 1 and "E_STOPPED" in stopped.error_lines[0]
    assert (examples.parent / "scontrol.log").read_text() == "requeue 42\n"

    step = json.loads((examples.parent / "run/metrics.jsonl").read_text().splitlines()[-1])["step"]
    resumed = ok(batch_job(examples, {**environment, "EPOCHS": str(step // 22 + 2)}, "log.every=2").finish())
    assert f"resumed at step {step}" in resumed.out
    assert "every = 2" in (examples.parent / "run/config.toml").read_text(), "the script passes all its arguments on"
    assert (examples.parent / "scontrol.log").read_text() == "requeue 42\n"


@pytest.mark.promise("E1")
@pytest.mark.parametrize(("command", "before"), [("activate", "kill -USR1 $$"), ("mpirun", "kill -USR1 $PPID"),
                                                 ("python", "[ $OMPI_COMM_WORLD_RANK = 0 ] && kill -USR1 $$")])
def test_a_signal_before_python_runs_requeues_the_job_too(examples: Path, command: str, before: str) -> None:
    """The signal comes while the script starts, before mpirun can pass it on, and to a rank that is still a shell."""
    environment = stand_ins(examples.parent)
    path = examples.parent / ".venv/bin" / command
    path.write_text(path.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{before}\n") if command != "activate" else
                    f"{path.read_text()}{before}\n")
    stopped = batch_job(examples, environment).finish()
    assert stopped.rc in (85, 138), stopped.out + stopped.err
    assert (examples.parent / "scontrol.log").read_text() == "requeue 42\n"


def test_the_slurm_script_passes_a_failure_on_and_does_not_requeue(examples: Path) -> None:
    environment = stand_ins(examples.parent)
    failed = batch_job(examples, {**environment, "EPOCHS": "many"}).finish()
    assert failed.rc == 78 and not (examples.parent / "scontrol.log").exists()
