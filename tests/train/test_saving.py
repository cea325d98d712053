"""Checkpoints of whole runs: written while training goes on, cut short by kills and full disks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from runs import lines, record, refused, without_times, write
from standing import train
from test_checkpoint_faults import small_disk  # noqa: F401  (a fixture)

from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.manifest import load

EVERY = ("checkpoint.every=10", "checkpoint.best=false", "checkpoint.keep=9", "log.every=10")

FAULTY = '''
import os
import shutil
import signal
import threading

from mpitrain.train import Observer


class Killed(Observer):
    """The writing thread of one rank is killed, with its process, in the middle of a write of the second checkpoint."""

    def begin(self, run):
        self.mine = run.rank == int(os.environ["CULPRIT"])

    def before_checkpoint(self, step):
        if step != 20 or not self.mine:
            return
        write, training = os.pwrite, threading.current_thread()

        def pwrite(file, data, offset):
            if threading.current_thread() is training or b"part-" not in os.fsencode(os.readlink(f"/proc/self/fd/{file}")):
                return write(file, data, offset)
            write(file, bytes(data[:len(data) // 2]), offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwrite = pwrite


class Full(Observer):
    """The disk is full from the first checkpoint on, until one could not be saved."""

    def begin(self, run):
        self.rank, self.file = run.rank, run.folder.parent / "filler"

    def after_checkpoint(self, step):
        if self.rank == 0 and step == 10:
            room = os.statvfs(self.file.parent)
            self.file.write_bytes(bytes(room.f_bavail * room.f_frsize - (24 << 10)))

    def message(self, text):
        if self.rank == 0 and "not saved" in text:
            self.file.unlink()


class Lost(Observer):
    """Somebody moves or removes the run folder, or its lock file."""

    def begin(self, run):
        self.rank, self.folder, self.how = run.rank, run.folder, os.environ["HOW"]

    def after_step(self, step, fields, seconds):
        if self.rank or step != 15:
            return
        if self.how == "lock":
            (self.folder / "lock").unlink()
        elif self.how == "removed":
            shutil.rmtree(self.folder)
        else:
            self.folder.rename(self.folder.with_name("moved"))
            self.folder.mkdir()
'''


def content(manifest: bytes) -> dict[str, Any]:
    """A manifest without what is each run's own: its id, and the settings that it compares when it is resumed."""
    body: dict[str, Any] = json.loads(manifest)
    del body["sha256"], body["meta"]["id"], body["meta"]["experiment"]
    return body


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FAULTY)
    return write(tmp_path)


def test_a_run_leaves_the_same_files_whether_it_waits_for_its_checkpoints_or_not(config, tmp_path) -> None:
    for name, asynchronous in (("waiting", "false"), ("asynchronous", "true")):
        done = train(2, config, f"run.out={name}", f"checkpoint.asynchronous={asynchronous}", *EVERY, "comm.sharding=optimizer")
        assert done.rc == 0, done.err
        assert [f"step {step}  saved; training stood still for " in done.out for step in (10, 20, 30, 40, 50)] == [True] * 5
    waiting, asynchronous = tmp_path / "waiting", tmp_path / "asynchronous"
    files = sorted(path.relative_to(waiting) for path in (waiting / "checkpoints").rglob("*.*") if path.is_file())
    assert len(files) == 15                                                 # five manifests, ten parts
    for file in files:
        one, other = (waiting / file).read_bytes(), (asynchronous / file).read_bytes()
        assert one == other if file.suffix == ".h5" else content(one) == content(other), file
    assert without_times(lines(waiting)) == without_times(lines(asynchronous))
    for key in ("parameters_sha256", "buffers_sha256", "metrics"):
        assert record(waiting)[key] == record(asynchronous)[key]
    about = record(asynchronous)["checkpoints"]
    assert about["saved"] == 5 and 0 < about["longest_still_s"] <= about["still_s"]


@pytest.mark.promise("B1")
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_killed_while_its_thread_writes_leaves_the_old_checkpoint_and_the_run_goes_on_to_its_bits(
        config, tmp_path, culprit: int) -> None:
    options = (*EVERY, "comm.sharding=optimizer")
    killed = train(2, config, "run.out=cut", *options, "log.observers=['own.py:Killed']", env={"CULPRIT": str(culprit)})
    assert killed.rc == 137, killed.err
    assert [path.name for path in folders.candidates(tmp_path / "cut/checkpoints")] == ["step-00000010"]
    load(tmp_path / "cut/checkpoints/step-00000010").verify()
    for name, resume in (("cut", ("--resume",)), ("whole", ())):
        done = train(2, config, f"run.out={name}", *options, *resume)
        assert done.rc == 0, done.err
    assert record(tmp_path / "cut")["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))
    assert not [name for name in os.listdir(tmp_path / "cut/checkpoints") if ".tmp-" in name]


@pytest.mark.promise("B3")
@pytest.mark.parametrize("on_error", ["stop", "go_on"])
def test_a_disk_that_fills_up_ends_the_run_with_74_or_is_told_and_trained_past(config, small_disk, on_error) -> None:  # noqa: F811
    out = small_disk / "run"
    done = train(2, config, f"run.out={out}", f"checkpoint.on_error={on_error}", *EVERY, "log.observers=['own.py:Full']")
    if on_error == "stop":
        assert done.rc == 74 and len(done.error_lines) == 1, done.err
        assert "E_IO" in done.error_lines[0] and "ENOSPC" in done.error_lines[0] and "are free" in done.error_lines[0]
        assert [path.name for path in folders.candidates(out / "checkpoints")] == ["step-00000010"]
        assert store.latest(out / "checkpoints").step == 10
        return
    assert done.rc == 0, done.err
    (told,) = [line for line in done.out.splitlines() if "not saved" in line]
    assert told.startswith("step 20  not saved, and training goes on (the checkpoint of step 10 stands): ") and "ENOSPC" in told
    assert [folders.step_of(path) for path in folders.candidates(out / "checkpoints")] == [50, 40, 30, 10]
    whole = train(2, config, "run.out=whole", *EVERY)
    assert whole.rc == 0 and "not saved" not in whole.out
    assert record(out)["parameters_sha256"] == record(config.parent / "whole")["parameters_sha256"]


@pytest.mark.promise("B11")
@pytest.mark.parametrize("how, every, words", [
    ("lock", 10, "its lock file was removed, so another job may write to the run folder; nothing more is written"),
    ("removed", 10, "the run folder was moved or removed; nothing more is written"),
    ("replaced", 0, "the run folder was moved or removed, and another one made; nothing more is written")])
def test_a_run_whose_folder_is_not_its_own_any_more_ends_with_73(config, tmp_path, how: str, every: int, words: str) -> None:
    done = train(2, config, "run.out=run", f"checkpoint.every={every}", "checkpoint.asynchronous=false", "train.steps=30",
                 "log.observers=['own.py:Lost']",
                 env={"HOW": how})
    refused(done, 73, "E_OUTPUT", words)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("run/**") if path.is_dir())
    assert left == {"lock": ["run", "run/checkpoints", "run/checkpoints/step-00000010"], "removed": [], "replaced": ["run"]}[how]
