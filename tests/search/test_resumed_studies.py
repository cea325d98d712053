"""Studies that are killed and go on: no finished trial is lost or runs twice, and what is found is the same."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter

import pytest
from launch import is_python, launch, send, wait_until
from standing import mpirun
from studies import STUDY, journal, told

from mpitrain.search.folder import StudyFolder


def search(n, file, *words):
    return mpirun(n, "-m", "mpitrain", "search", file, *words, cwd=file.parent, timeout=120)


def results(folder):
    """How often each trial has a result at each rung, and the values of the last one."""
    found = [line for line in journal(folder) if line["kind"] == "result"]
    return Counter((line["trial"], line["rung"]) for line in found), {
        (line["trial"], line["rung"]): line["values"]["accuracy"] for line in found}


def killed_after(folder, file, n_lines, *words):
    """Starts a study on two ranks, and kills one of them when its journal has so many lines, unless it has ended."""
    job = launch(2, "-m", "mpitrain", "search", file, *words, cwd=file.parent)
    path = folder / "journal.jsonl"
    for _ in range(10):                                       # a crowded machine starts a job in many seconds
        wait_until(lambda: job.process.poll() is not None or path.exists() and path.read_bytes().count(b"\n") >= n_lines)
    for rank in [pid for pid in job.ranks() if is_python(pid)][n_lines % 2:][:1]:
        send(rank, signal.SIGKILL)
    result = job.finish(30)
    if result.rc:                                             # the watcher names who was killed, in a line
        assert len(result.error_lines) <= 1 and all("was killed" in line for line in result.error_lines), result.err


def test_a_killed_study_goes_on_where_its_journal_ends(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    killed_after(tmp_path / "killed", file, 8, "run.out=killed")
    done = {key for key, n in results(tmp_path / "killed")[0].items() if n}
    assert 0 < len(done) < 13
    with open(tmp_path / "killed" / "journal.jsonl", "a") as torn:
        torn.write('{"kind": "resu')
    (tmp_path / "killed" / "turn").touch()                    # a rank was killed in its turn
    result = search(2, file, "run.out=killed", "--resume")
    assert result.rc == 0, result.err
    assert "was killed in the midst of a decision; its lock is removed" in result.err, result.err
    assert search(2, file, "run.out=whole").rc == 0
    assert told(tmp_path / "killed") == told(tmp_path / "whole")
    assert max(results(tmp_path / "killed")[0].values()) == 1
    assert results(tmp_path / "killed")[1] == results(tmp_path / "whole")[1]
    again = search(2, file, "run.out=killed", "--resume")     # nothing is left to do
    assert again.rc == 0 and told(tmp_path / "killed") == told(tmp_path / "whole")
    path = tmp_path / "killed" / "journal.jsonl"              # a trial goes on whose checkpoints are damaged
    records, kept = journal(tmp_path / "killed"), path.read_text().splitlines(keepends=True)
    last = max(i for i, record in enumerate(records) if record["kind"] == "promote")
    path.write_text("".join(kept[:last + 1]))
    for part in (tmp_path / f"killed/trials/{records[last]['trial']:04d}/checkpoints").glob("*/part-*.h5"):
        part.write_bytes(part.read_bytes()[:100])
    anew = search(2, file, "run.out=killed", "--resume")
    assert anew.rc == 0 and anew.err.count("are removed, and the trial is trained anew") == 1, anew.err
    assert told(tmp_path / "killed") == told(tmp_path / "whole")
    begins = [line for line in journal(tmp_path / "killed") if line["kind"] == "job"]
    assert len(begins) == json.loads((tmp_path / "killed" / "study.json").read_text())["times"]["jobs"] == 3


def test_one_folder_has_one_study(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    few = ("search.trials=3", "search.rungs=[1]", "train.epochs=1")
    nothing = search(1, file, *few, "--resume")
    assert nothing.rc == 66 and "no journal" in nothing.error_lines[0], nothing.err
    assert search(1, file, *few).rc == 0
    again = search(1, file, *few)
    assert again.rc == 73 and "--resume goes on with the study" in again.error_lines[0], again.err
    other = search(1, file, *few, "--resume", "optimizer.momentum=0.5")
    assert other.rc == 65 and "E_CHECKPOINT" in other.error_lines[0] and "another study" in other.error_lines[0], other.err
    fresh = search(1, file, *few, "--overwrite", "optimizer.momentum=0.5")
    assert fresh.rc == 0 and len(journal(tmp_path / "runs/study")) == 1 + 1 + 3 + 3, fresh.err
    more = search(1, file, *few, "--resume", "optimizer.momentum=0.5", "search.trials=4")
    assert more.rc == 0 and told(tmp_path / "runs/study")["reached"] == {"1": 4}, more.err
    run = mpirun(1, "-m", "mpitrain", "train", tmp_path / "runs/study/best.toml", "--quiet", cwd=tmp_path)
    assert run.rc == 0, run.err
    of_a_run = search(1, file, *few, "run.out=runs/study-best", "--overwrite")
    assert of_a_run.rc == 73 and "that of a run" in of_a_run.error_lines[0], of_a_run.err
    both = search(1, file, "--resume", "--overwrite")
    assert both.rc == 64
    other_job = StudyFolder(tmp_path / "runs/study")
    other_job.begin(resume=True, overwrite=False)
    try:
        busy = search(2, file, *few, "--resume", "optimizer.momentum=0.5", "search.trials=4")
    finally:
        other_job.close()
    assert busy.rc == 73 and "busy: a job holds it" in busy.error_lines[0], busy.err


@pytest.mark.slow
def test_a_rank_that_stands_still_in_a_trial_is_named_though_others_wait_for_good_reason(tmp_path):
    (tmp_path / "own.py").write_text("""
import time

from mpitrain.train import Observer


class Hangs(Observer):
    def begin(self, run):
        self.hangs = run.folder.name == "0001"

    def before_step(self, step):
        while self.hangs and step == 5:
            time.sleep(1)
""")
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    job = launch(2, "-m", "mpitrain", "search", file, "log.observers=own.py:Hangs", "train.stall_s=4", cwd=tmp_path)
    result = job.finish(60)
    assert result.rc == 75 and len(result.error_lines) == 1 and "E_STALL" in result.error_lines[0], result.err
    assert "warning" not in result.err
    done = results(tmp_path / "runs/study")[0]
    assert done and max(done.values()) == 1 and (1, 0) not in done


@pytest.mark.slow
def test_a_study_that_is_asked_to_stop_saves_its_trials_and_goes_on(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    assert search(2, file, "run.out=whole").rc == 0
    job = launch(2, "-m", "mpitrain", "search", file, "run.out=stopped", cwd=tmp_path)
    path = tmp_path / "stopped" / "journal.jsonl"
    while job.process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 6):
        time.sleep(0.002)
    job.signal(signal.SIGUSR1)
    result = job.finish(60)
    assert result.rc == 85 and "E_STOPPED" in result.error_lines[0] and "--resume" in result.error_lines[0], result.err
    assert json.loads((tmp_path / "stopped/study.json").read_text())["status"] == "stopped"
    assert search(2, file, "run.out=stopped", "--resume").rc == 0
    assert told(tmp_path / "stopped") == told(tmp_path / "whole") and max(results(tmp_path / "stopped")[0].values()) == 1


@pytest.mark.slow
def test_studies_killed_at_random_moments_find_the_same(tmp_path):
    file, chance = tmp_path / "study.toml", random.Random(18)
    file.write_text(STUDY)
    assert search(2, file, "run.out=whole").rc == 0
    lines = len(journal(tmp_path / "whole"))
    for moment in range(4):
        folder = tmp_path / f"killed-{moment}"
        killed_after(folder, file, chance.randrange(1, lines), f"run.out={folder}")
        resume = ("--resume",) if (folder / "journal.jsonl").exists() else ()
        result = search((2, 1, 4)[moment % 3], file, f"run.out={folder}", *resume)      # on any number of groups
        assert result.rc == 0, result.err
        assert told(folder) == told(tmp_path / "whole") and max(results(folder)[0].values()) == 1
