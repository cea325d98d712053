"""Whatever happens during a save, a whole checkpoint is there afterwards and nothing half is called one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint import store
from mpitrain.checkpoint.manifest import load
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.store import Piece
from mpitrain.errors import OutputError, StorageError

HERE = Path(__file__).resolve().parent


@pytest.mark.promise("B1", "B2", "B13")
@pytest.mark.parametrize("scenario", ["asynchronous", pytest.param("next", marks=pytest.mark.slow),
                                      pytest.param("again", marks=pytest.mark.slow)])
def test_kill_or_errors_at_every_system_call_leave_the_old_or_the_new_checkpoint(scenario: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, str(HERE / "crash_sweep.py"), str(tmp_path), scenario], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bad"] == []
    assert result["points"] > 200 and result["clean"] > 100                 # a sweep that breaks nothing proves nothing


@pytest.mark.promise("B1")
def test_the_sweep_notices_a_save_that_publishes_first(tmp_path: Path) -> None:
    """The control: the same faults, with the rename done before the manifest is written."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    program = """if True:
        import json, pathlib, sys
        import crash_sweep
        from mpitrain.checkpoint import store
        publish = store._publish
        def eager(work, final, *rest):
            work.rename(final)
            publish(final, work, *rest)
        store._publish = eager
        print(json.dumps(crash_sweep.sweep(pathlib.Path(sys.argv[1]), crash_sweep.scenario_next, ["kill"])))"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True,
                          timeout=120)
    found = "there is no checkpoint in this folder" in done.stderr if done.returncode else json.loads(done.stdout)["bad"]
    assert found, done.stdout + done.stderr


def big_save(folder: Path, step: int) -> Path:
    return store.save(folder, step, [Piece.whole("parameters/w", np.full(1 << 17, float(step)))], {})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2.5 MiB with room for two checkpoints of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-o", "size=2560k,nr_inodes=40"]
    if subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs (root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.promise("B3")
def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    run = small_disk / "run" / "checkpoints"
    big_save(run, 1)
    big_save(run, 2)
    with pytest.raises(StorageError, match=r"reserving space failed: No space left on device \(ENOSPC\); it needs 10\d{5} bytes, "
                                           r"\d+ are free; free some space or set run.out") as caught:
        big_save(run, 3)
    assert caught.value.exit_code == 74 and "part-00000.h5" in str(caught.value)
    assert sorted(os.listdir(run)) == ["step-00000001", "step-00000002"]
    assert store.latest(run).step == 2
    store.prune(run, 1)
    assert load(big_save(run, 3)).read("parameters/w")[0] == 3.0


@pytest.mark.promise("B3")
def test_used_up_inodes_are_a_clear_error_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    run = small_disk / "run" / "checkpoints"
    big_save(run, 1)
    with pytest.raises(OSError, match="No space"):
        for i in range(100):
            (small_disk / f"filler-{i}").touch()
    os.unlink(small_disk / "filler-0")                                      # room for the folder, not for a file in it
    with pytest.raises(StorageError, match="no inode .file. is free"):
        big_save(run, 2)
    assert store.latest(run).step == 1


@pytest.mark.promise("B12")
def test_a_read_only_file_system_is_refused_with_73(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk / "run", small_disk / "new"):
        with pytest.raises(OutputError, match="Read-only file system.*set run.out to a folder that can be written") as caught:
            RunFolder(path).open()
        assert caught.value.exit_code == 73
