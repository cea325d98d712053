"""The folder of a run: one job at a time, nothing of anyone else's touched.

    runs/gpt/  config.toml  metrics.jsonl  run.json  trace.json  privacy.json  checkpoints/step-*/  errors/*.json  lock
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import claim, folders
from mpitrain.errors import LostFolderError, OutputError, print_warning
from mpitrain.files.disk import FILE_MODE, make_folder, refuse_strangers, replace_file, storage_error

FILES = ("config.toml", "metrics.jsonl", "run.json", "trace.json", "privacy.json")
ERRORS = re.compile(r"(rank|step)-[0-9]{1,9}\.(json|stack\.txt)")
UNFINISHED = ".tmp"                                       # the suffix while writing; one job holds the folder, so one name does
LOCKS = re.compile(r"lock(\.[0-9]{1,9})?")               # with a number: where the file system has no locks
ADVICE = "--resume continues its run, --overwrite deletes that run and starts anew; or set run.out to another folder"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunFolder:
    """The paths of a run's files. Any rank may make one; rank 0 calls `open`, which makes the folder and locks it.

    If it is not `synced`, its texts and its name may be lost in a power cut.
    """

    def __init__(self, path: str | os.PathLike[str], *, synced: bool = True):
        self.path, self.synced = Path(path), synced
        self.config, self.metrics, self.run_json, self.trace, _ = (self.path / name for name in FILES)
        self.checkpoints = self.path / "checkpoints"
        self.errors = self.path / "errors"
        self.inner = self.checkpoints                     # the folder inside that `open` makes
        self._lock_path = self.path / "lock"
        self._lock: int | None = None
        self._is_locked, self._signed = False, ""
        self._claim: claim.Claim | None = None            # where the file system, of this host or of another, has no locks
        self._held: tuple[os.stat_result, os.stat_result] | None = None       # the folder and `lock`, as they were locked

    def open(self, *, resume: bool = False, overwrite: bool = False, advice: str = ADVICE) -> RunFolder:
        """Make the folder, or take the one that is there, and hold it until `close` or the end of the process.

        A folder with anything in it is refused unless `resume`, which keeps all, or `overwrite`, which deletes what runs
        write and nothing else. OutputError says so, with the caller's `advice`, also when another job holds it, or it is a
        link, a file, read-only; AccessError when it may not be written.
        """
        assert not (resume and overwrite), "one or the other"
        if os.path.islink(self.path):                     # pathlib's raises where the name is too long
            raise OutputError(f"the run folder is a symbolic link to {os.readlink(self.path)}; set run.out to the folder itself",
                              file=self.path)
        make_folder(self.path, synced=self.synced)
        if not self.path.is_dir():
            raise OutputError("the run folder is a file; remove it or set run.out to another name", file=self.path)
        refuse_strangers(self.path)
        if not (resume or overwrite or self._lock_path.exists()):
            self._refuse_contents(advice)                 # before a lock file would litter a folder that is not a run's
        self._take_lock()
        try:
            if not (resume or overwrite):
                self._refuse_contents(advice)
            for folder in (self.checkpoints, self.errors):
                if folder.is_symlink():
                    raise OutputError("expected a folder of the run, found a symbolic link; remove it", file=folder)
                if folder.is_dir():
                    refuse_strangers(folder)
            if overwrite:
                self._delete_ours()
            make_folder(self.inner, synced=self.synced)
        except OSError as error:
            self.close()
            raise storage_error(error, "preparing the run folder", self.path) from error
        except BaseException:
            self.close()
            raise
        return self

    def _refuse_contents(self, advice: str) -> None:
        there = [name for name in os.listdir(self.path) if not LOCKS.fullmatch(name)]
        if there:
            raise OutputError(f"the run folder is not empty ({_some(there)}): {advice}", file=self.path)

    def _take_lock(self) -> None:
        """Hold `lock` with flock, which the system frees however the job ends; its text tells others who holds it.

        A file system without locks gets a `Claim`, which hosts that have locks there heed, too.
        """
        path = self._lock_path
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise storage_error(error, "making the lock file", path) from error
        try:
            if self._has_locks():
                self._sign(claim.holder())
                if claim.newest_in(self.path):
                    self._take_claim()
                    self._sign(claim.holder() + claim.CLAIMED)
            else:                                         # some parallel file systems are mounted without locks
                claim.refuse_locked(self.path, self._holder())
                self._take_claim()
                claim.refuse_locked(self.path, self._holder())
            self._held = os.stat(self.path), os.fstat(self._lock)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise storage_error(error, "locking", path) from error
            raise

    def _has_locks(self) -> bool:
        """Whether flock works here; it holds the file then. OutputError where another job does, or the file is another's."""
        assert self._lock is not None
        text = self._holder()
        if text and not text.startswith("host="):
            raise OutputError("expected the lock file of a run, found another file of that name; rename it or set run.out to "
                              "another folder", file=self._lock_path)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise claim.busy(text, self.path) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        self._is_locked = True
        return True

    def _holder(self) -> str:
        """The text of `lock`, opened anew: only then does a network file system ask its server."""
        file = os.open(self._lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.pread(file, claim.LONGEST, 0).decode(errors="replace").strip()
        finally:
            os.close(file)

    def _sign(self, text: str) -> None:
        """Writes into `lock`; hosts without locks see it when this returns."""
        assert self._lock is not None
        try:
            os.pwrite(self._lock, claim.padded(text), 0)
            if self.synced:
                os.fsync(self._lock)
            self._signed = text
        except OSError as error:
            raise storage_error(error, "writing", self._lock_path) from error

    def _take_claim(self) -> None:
        taken = claim.Claim(self.path)
        taken.take()
        self._claim = taken

    def close(self) -> None:
        """Free the folder for another job. The empty lock file stays: deleting it would let two jobs hold two of them."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._lock is not None:
            if self._is_locked:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._lock, 0)           # for hosts without locks
            os.close(self._lock)
            self._lock, self._is_locked, self._held = None, False, None

    def refuse_lost(self) -> None:
        """OutputError where this job does not hold the folder any more: asked before something is made in it, or gets its final
        name.

        Somebody has moved or removed the folder or its lock file, or, if a host has no locks, another job has taken it.
        """
        if self._held is not None:
            self._refuse_moved(*self._held)
        if self._claim is not None:
            self._claim.refuse_lost()
        elif self._is_locked:
            claim.refuse_unlocked(self.path)

    def _refuse_moved(self, folder: os.stat_result, lock: os.stat_result) -> None:
        """LostFolderError unless what stands at the paths is what was locked. The open file keeps both numbers from reuse.

        Where a mount has no lasting numbers (some of FUSE, CIFS, 9p), what we have signed is ours, too. So is a copy of it, until
        somebody takes that, who signs it.
        """
        now = _looked_at(self.path)
        is_same = now is not None and os.path.samestat(now, folder)
        if not is_same and self._is_signed():
            return
        if not is_same:
            raise LostFolderError(f"the run folder was moved or removed{', and another one made' if now else ''}; nothing more "
                                  "is written: move it back and go on with --resume, or start anew", file=self.path)
        now = _looked_at(self._lock_path)
        if now is None or not (os.path.samestat(now, lock) or self._is_signed()):
            raise LostFolderError("its lock file was removed, so another job may write to the run folder; nothing more is "
                                  "written: wait for that job if there is one, and go on with --resume", file=self._lock_path)

    def _is_signed(self) -> bool:
        """Whether our text, or that of our claim, is in what stands at the path of `lock` now."""
        try:
            text = self._holder()                         # a claim signs its own file, and leaves this one as it was
            return (text == self._signed or not self._is_locked) and (self._claim is None or self._claim.is_signed())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise storage_error(error, "looking at the lock file", self._lock_path) from error

    def _delete_ours(self) -> None:
        for kept in folders.remove_all(self.checkpoints):
            inside = f" ({_some(os.listdir(kept))})" if kept.is_dir() and not kept.is_symlink() else ""
            print_warning(f"--overwrite leaves {kept}, which is no run's or holds what no run writes{inside}: move or remove it")
        for name in FILES:
            for path in (self.path / name, self.path / (name + UNFINISHED)):
                if path.is_symlink() or path.is_file():
                    path.unlink()                         # a link alone goes, not its target
        if self.errors.is_dir():
            for path in sorted(self.errors.iterdir()):
                if ERRORS.fullmatch(path.name):
                    path.unlink()

    def about(self) -> dict[str, Any]:
        """The content of run.json, {} where there is none that can be read."""
        try:
            found = json.loads(self.run_json.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_text(self, path: Path, text: str) -> None:
        """Replace one of the run's files: a reader, or a crash, sees the old text or the new one."""
        self.refuse_lost()
        replace_file(path, text, UNFINISHED, synced=self.synced)

    def write_json(self, path: Path, values: Any) -> None:
        """`write_text` of `values` as JSON, indented for people."""
        self.write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")

    def truncate_metrics(self, step: int) -> int:
        """Remove the lines logged after `step`, the checkpoint's, and a last line torn by a kill; returns how many."""
        try:
            lines = self.metrics.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise storage_error(error, "reading", self.metrics) from error
        kept = [line for line in lines if _logged_by(line, step)]
        if len(kept) < len(lines):
            self.write_text(self.metrics, b"".join(kept).decode())
        return len(lines) - len(kept)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def _looked_at(path: Path) -> os.stat_result | None:
    """What stands at the path, None if there is nothing. It follows links: a folder that a link replaces is the same one."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, "looking at the run folder", path) from error


def _logged_by(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, TypeError, KeyError):
        return False                                      # zeros that a power cut left: a line we did not finish
