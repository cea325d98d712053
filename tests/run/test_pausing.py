"""Runs that pause after an evaluation and go on in another communicator, one after the other in the processes of one job."""

from __future__ import annotations

import json

from launch import mpirun
from runs import SMALL, record, write

PROGRAM = """
from pathlib import Path

from mpitrain import Process, Run, load_config, start
from mpitrain.errors import ConfigError
from mpitrain.run.run import AsTrial
from mpitrain.run.session import Session, before_mpi, look_at_files
from mpitrain.search.groups import Groups
from mpitrain.train.intervals import Pauses

process, epochs = Process(), 4


def configured(name, *overrides):
    return load_config(Path("run.toml"), [f"run.out={name}", *overrides])


def one(session, comm, config, goes_on=None):
    def pauses(plan):
        return Pauses((10, 20, 30), goes_on)
    with Run(config, comm, process=process, quiet=True, after=session) as run:
        return run.train(resume="auto", as_trial=AsTrial(pauses) if goes_on else None)


def main():
    files = before_mpi(lambda: look_at_files(configured("x")))
    world = start().comm
    described = world.bcast(files())
    groups = [world.Split(0, world.rank) for _ in "ab"]
    sessions = [Session(configured("x"), comm) for comm in groups]
    for session in sessions:
        session.open(configured("x"), lambda: described)
    channels = [len(session.mesh._channels) for session in sessions]
    whole = one(sessions[0], groups[0], configured("whole"))
    for i, last in enumerate((20, 30, None)):                  # by turns in this group's one mesh and in the other
        config, asked = configured("parts"), []

        def goes_on(step, metrics):
            asked.append(step)
            return step != last
        found = one(sessions[i % 2], groups[i % 2], config, goes_on)
        assert found.paused == (last is not None), found
        assert asked == [[10, 20], [20, 30], [30]][i], asked
    assert found.hashes == whole.hashes and found.metrics == whole.metrics, (found, whole)
    assert [len(session.mesh._channels) for session in sessions] == channels
    one(sessions[0], groups[0], configured("other", "model.hidden=[24]", "train.batch_size=48"))
    try:
        one(sessions[0], groups[0], configured("refused", "train.eval_every=7"), lambda step, metrics: True)
    except ConfigError as error:
        assert "step 10" in error.message and "train.eval_every = 7" in error.message
    else:
        raise AssertionError("it was not refused")
    for session in sessions:
        session.close()
    side_by_side = Groups(world, configured("x"), 1, lambda: described)
    assert side_by_side.session.mesh.before == world.rank and side_by_side.threads == sessions[0].threads
    side_by_side.close()
    return 0


process.run(main)
"""


def lines(folder):
    """metrics.jsonl without its times."""
    times = ("seconds", "step_s", "samples_per_s", "comm_exposed_s", "comm_exposed_share", "peak_rss_mb")
    return [{key: value for key, value in json.loads(line).items() if key not in times}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_pauses_twice_has_the_bits_and_lines_of_one_that_does_not(tmp_path):
    write(tmp_path, SMALL.replace("steps = 50", "steps = 40\nmicro_batches = 2").replace("eval_every = 25", "eval_every = 10"))
    (tmp_path / "program.py").write_text(PROGRAM)
    result = mpirun(2, tmp_path / "program.py", cwd=tmp_path, timeout=120)
    assert result.rc == 0, result.err
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert lines(whole) == lines(parts) and len(lines(whole)) > 4
    about = record(parts)
    assert about["status"] == "done" and about["parameters_sha256"] == record(whole)["parameters_sha256"]
    assert about["changes"] == [], "a run that goes on in another communicator is the same experiment"
