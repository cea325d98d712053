"""The run folder: one job at a time, clear refusals, and nothing of anyone else's touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.errors import AccessError, LostFolderError, OutputError, StorageError
from mpitrain.files.disk import write_file

ROOT = Path(__file__).resolve().parents[2]


def finished_run(path: Path) -> Path:
    with closing(RunFolder(path).open()) as run:
        run.write_text(run.config, "[run]\n")
        run.write_json(run.run_json, {"ok": True})
        run.metrics.write_text('{"step": 1}\n')
        run.errors.mkdir()
        (run.errors / "rank-3.json").touch()
        store.save(run.checkpoints, 1, [store.Piece.whole("w", np.ones(3))], {})
        (run.checkpoints / "step-00000002.tmp-0123abcd").mkdir()
    return path


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_a_missing_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path / "a" / "b" / "run").open()) as run:
        assert tree(run.path) == ["checkpoints", "lock"]


@pytest.mark.promise("B12")
def test_a_run_that_is_there_is_refused_and_the_flags_are_named(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = tree(path)
    with pytest.raises(OutputError, match=r"the run folder is not empty \(checkpoints, config.toml, errors, \.\.\.\): --resume "
                                          r"continues its run, --overwrite deletes that run and starts anew") as caught:
        RunFolder(path).open()
    assert caught.value.exit_code == 73 and tree(path) == before
    RunFolder(path).open(resume=True).close()                               # the refusal freed the lock


@pytest.mark.promise("B12")
def test_a_folder_of_other_things_is_refused_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(OutputError, match="not empty .thesis.tex."):
        RunFolder(tmp_path).open()
    assert tree(tmp_path) == ["thesis.tex"]


def test_a_folder_left_by_a_run_killed_at_once_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    RunFolder(tmp_path).open().close()
    assert tree(tmp_path) == ["checkpoints", "lock"]


def test_resume_keeps_everything(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = tree(path)
    RunFolder(path).open(resume=True).close()
    assert tree(path) == before


@pytest.mark.promise("B12")
def test_overwrite_deletes_what_runs_write_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished_run(tmp_path / "run")
    foreign = ["notes.md", "checkpoints/best.h5", "checkpoints/step-00000001/plot.png", "errors/rank-x.json", "metrics.jsonl.bak",
               "checkpoints/step-9/manifest.json", "checkpoints/step-00000001/sub"]
    for name in foreign:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")
    (path / "run.json").unlink()
    (path / "run.json").symlink_to(path / "notes.md")
    RunFolder(path).open(overwrite=True).close()
    files = [name for name in tree(path) if not (path / name).is_dir()]
    assert [name for name in files if "plot.png" not in name and "sub" not in name] == [
        "checkpoints/best.h5", "checkpoints/step-9/manifest.json", "errors/rank-x.json", "lock", "metrics.jsonl.bak", "notes.md"]
    assert sum("plot.png" in name or name.endswith("/sub") for name in files) == 2
    assert (path / "notes.md").read_text() == "mine"
    (kept,) = [name for name in tree(path) if name.startswith("checkpoints/step-00000001.tmp-") and name.count("/") == 1]
    assert capsys.readouterr().err == (f"warning: --overwrite leaves {path / kept}, which is no run's or holds what no run "
                                       "writes (plot.png, sub): move or remove it\n")
    assert folders.candidates(path / "checkpoints") == []


@pytest.mark.promise("B12")
def test_overwrite_leaves_a_link_and_a_file_with_the_name_of_a_checkpoint_and_says_so(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished_run(tmp_path / "run")
    RunFolder(path).open(overwrite=True).close()
    assert capsys.readouterr().err == ""                                    # the control: all of it is a run's
    (path / "checkpoints/step-00000005").touch()
    (path / "checkpoints/step-00000006").symlink_to(tmp_path)
    RunFolder(path).open(overwrite=True).close()
    file, link = capsys.readouterr().err.splitlines()
    assert "step-00000005.tmp-" in file and "step-00000006, which is no run's" in link


@pytest.mark.promise("B12", "F7")
def test_a_link_a_file_and_linked_folders_inside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="the run folder is a symbolic link to .*real; set run.out to the folder itself"):
        RunFolder(tmp_path / "link").open()
    with pytest.raises(OutputError, match="File name too long .*set run.out to a shorter name"):
        RunFolder(tmp_path / ("a" * 300)).open()
    with pytest.raises(OutputError, match="the run folder is a file; remove it or set run.out"):
        RunFolder(tmp_path / "file").open()
    with pytest.raises(OutputError, match="Not a directory.*a file stands where a folder should"):
        RunFolder(tmp_path / "file" / "run").open()
    (tmp_path / "real" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="expected a folder of the run, found a symbolic link; remove it"):
        RunFolder(tmp_path / "real").open(overwrite=True)
    (tmp_path / "real" / "lock").unlink()
    (tmp_path / "real" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="a symbolic link stands where a file of ours should"):
        RunFolder(tmp_path / "real").open(resume=True)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.promise("B12")
def test_another_program_s_file_called_lock_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("yarn lockfile v1")
    with pytest.raises(OutputError, match="expected the lock file of a run, found another file of that name"):
        RunFolder(tmp_path).open(resume=True)
    assert (tmp_path / "lock").read_text() == "yarn lockfile v1"


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that everyone can reach, and this process as a user who owns nothing."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.promise("B12")
def test_a_folder_that_may_not_be_written_is_refused_with_77(as_nobody: Path) -> None:
    for path in (as_nobody, as_nobody / "new"):
        with pytest.raises(AccessError, match="Permission denied .EACCES.; change its|belongs to user 0, and") as caught:
            RunFolder(path).open()
        assert caught.value.exit_code == 77


HOLD = """if True:
    import sys
    from mpitrain.checkpoint.run_folder import RunFolder
    run = RunFolder(sys.argv[1]).open()
    print("held", flush=True)
    input()"""


@pytest.mark.promise("B11")
def test_a_folder_another_job_holds_is_busy_until_that_job_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for flags in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(OutputError, match=rf"busy: a job holds it \(host={socket.gethostname()} pid={holder.pid} "
                                                  rf"since=\d{{4}}-.*\); wait for it") as caught:
                RunFolder(tmp_path / "run").open(**flags)
            assert caught.value.exit_code == 73
        holder.send_signal(signal.SIGKILL)
    with closing(RunFolder(tmp_path / "run").open(resume=True)) as run:
        assert f"pid={os.getpid()} " in (run.path / "lock").read_text()


def test_a_closed_run_can_be_opened_again_by_the_same_program(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path).open()) as run:
        with pytest.raises(OutputError, match="busy"):
            RunFolder(tmp_path).open(resume=True)
        run.close()
        RunFolder(tmp_path).open(resume=True).close()


LOSSES: dict[str, Callable[[Path], object]] = {
    "lock removed": lambda run: (run / "lock").unlink(),
    "lock made anew": lambda run: ((run / "lock").rename(run / "kept"), (run / "lock").touch()),
    "folder moved": lambda run: run.rename(run.with_name("moved")),
    "another in its place": lambda run: (run.rename(run.with_name("moved")), run.mkdir()),
    "another job in its place": lambda run: (run.rename(run.with_name("moved")), finished_run(run)),
    "folder removed": shutil.rmtree,
}


@pytest.mark.promise("B11")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_folder_that_was_moved_or_whose_lock_was_removed_gets_nothing_more(tmp_path: Path, loss: str) -> None:
    array = store.Piece.whole("w", np.ones(3))
    with closing(RunFolder(tmp_path / "run").open()) as run:
        run.write_json(run.run_json, {"control": True})
        store.save(run.checkpoints, 1, [array], {})
        begun = store.Save(run.checkpoints, 2, {}, store.ALONE, before=run.refuse_lost)
        begun.begin(lambda: [array])
        LOSSES[loss](run.path)
        before = tree(tmp_path)
        said = "its lock file was removed, so another job may write" if "lock" in loss else "the run folder was moved or removed"
        later = store.Save(run.checkpoints, 3, {}, store.ALONE, before=run.refuse_lost)
        for publish in (lambda: run.write_json(run.run_json, {}), lambda: later.begin(lambda: [array]),
                        lambda: (begun.work(), begun.agree(), begun.work(), begun.agree())):
            with pytest.raises(LostFolderError, match=said) as caught:
                publish()
            assert caught.value.exit_code == 73
        assert [name for name in tree(tmp_path) if "tmp-" not in name] == [name for name in before if "tmp-" not in name]


@pytest.mark.promise("B11")
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_mount_that_gives_other_numbers_to_the_same_folder_is_no_loss(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with closing(RunFolder(tmp_path / "run").open()) as run:
        monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
        run.write_json(run.run_json, {"a": 1})
        for path in run.path.glob("lock.1" if run._claim else "lock"):
            path.write_text("host=another")
        with pytest.raises(LostFolderError, match="the run folder was moved or removed, and another one made"):
            run.write_json(run.run_json, {"a": 2})
    assert json.loads(run.run_json.read_text()) == {"a": 1}


def test_a_folder_that_was_moved_and_left_a_link_is_the_same(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path / "run").open()) as run:
        run.path.rename(tmp_path / "moved")
        run.path.symlink_to(tmp_path / "moved")
        run.write_json(run.run_json, {"a": 1})
    assert (tmp_path / "moved" / "run.json").exists()


def test_a_file_whose_folder_is_gone_blames_that(tmp_path: Path) -> None:
    with pytest.raises(LostFolderError, match="making the file failed: No such .*: the folder .*/gone was moved or removed$"):
        write_file(tmp_path / "gone" / "part-00000.h5", [b"x"])


def test_a_lock_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(StorageError, match="locking failed: Input/output error"):
        RunFolder(tmp_path).open()


# ---- files -----------------------------------------------------------------------------------------------------------

def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunFolder(tmp_path).open()) as run:
        run.write_json(run.run_json, {"a": 1})
        pwrite = os.pwrite

        def failing(fd: int, data: memoryview, offset: int) -> int:
            if offset:
                raise OSError(errno.ENOSPC, "x")
            return pwrite(fd, data[:3], 0)

        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(StorageError, match="No space left"):
            run.write_json(run.run_json, {"a": 2})
        assert json.loads(run.run_json.read_text()) == {"a": 1}
        monkeypatch.undo()
        run.write_json(run.run_json, {"a": 3})                              # over what the failed one left
        assert json.loads(run.run_json.read_text()) == {"a": 3} and tree(tmp_path) == ["checkpoints", "lock", "run.json"]


@pytest.mark.promise("B14")
def test_resuming_forgets_the_metrics_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    kept = '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.30000000000000004}\n{"step": 2, "split": "validation"}\n'
    run.metrics.write_text(kept + '{"step": 3, "loss": 0.2}\n{"step": 3, "split": "validation"}\n{"step": 2, "lo')
    assert run.truncate_metrics(2) == 3
    assert run.metrics.read_text() == kept
    inode = run.metrics.stat().st_ino
    assert run.truncate_metrics(2) == 0 and run.metrics.stat().st_ino == inode


@pytest.mark.promise("B14")
def test_a_line_torn_just_before_its_end_is_forgotten_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2}')                       # the next line would be glued to it
    assert run.truncate_metrics(2) == 1 and run.metrics.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("line", [b"\0\0\0\0\n", b"[1]\n", b'{"loss": 1}\n', b'{"step": null}\n', b"\xff\n"])
def test_a_line_that_is_no_metrics_line_is_forgotten(line: bytes, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_bytes(line + b'{"step": 1}\n')
    assert run.truncate_metrics(5) == 1 and run.metrics.read_bytes() == b'{"step": 1}\n'


def test_metrics_that_were_never_written_need_no_truncating(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).truncate_metrics(5) == 0


# ---- other users ------------------------------------------------------------------------------------------------------

@pytest.mark.promise("F7")
def test_a_folder_that_all_users_may_write_is_refused_unless_each_deletes_only_his_own(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    for folder in (path, path / "checkpoints", path / "errors"):
        RunFolder(path).open(resume=True).close()
        folder.chmod(0o777)
        with pytest.raises(AccessError, match=r"every user may write the folder.*chmod -R o-w") as caught:
            RunFolder(path).open(resume=True)
        assert caught.value.exit_code == 77 and caught.value.file == str(folder)
        folder.chmod(0o1777)
    RunFolder(path).open(resume=True).close()


@pytest.mark.promise("F7")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a folder away")
    path = finished_run(tmp_path / "run")
    os.chown(path, 12345, -1)
    with pytest.raises(AccessError, match="the folder belongs to user 12345, and this is user 0"):
        RunFolder(path).open(resume=True)
    os.chown(path, 65534, -1)                             # what root's own files are called on many a file server
    RunFolder(path).open(resume=True).close()


@pytest.mark.promise("F7")
def test_without_a_umask_nothing_is_made_that_all_users_may_write(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = finished_run(tmp_path / "run")
    finally:
        os.umask(umask)
    made = [p for p in (path, *path.rglob("*")) if p not in (path / "metrics.jsonl", path / "errors", path / "errors/rank-3.json")
            and not p.name.endswith("0123abcd")]                         # the four that the test itself makes
    assert len(made) > 6 and not [p for p in made if p.stat().st_mode & 0o002]
