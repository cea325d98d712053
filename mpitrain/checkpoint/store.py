"""Checkpoints: named arrays on the disk that are whole or not there, whatever happens while they are written.

    checkpoints/step-00000100/manifest.json      step, meta, and for each array: dtype, global shape, where its pieces lie
                              part-00000.h5      pieces from one writing rank, an ordinary HDF5 file

A rank writes the slices it holds, under global names, so any other layout of ranks can read them back. Everything goes to
`step-00000100.tmp-NONCE` first; each part is synced and read again, the manifest with all SHA-256 sums comes last, and one
rename publishes the whole. Reading uses the offsets in the manifest and never libhdf5, and trusts nothing it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.folders import MANIFEST, candidates, discard, holds_only_ours, remove_ours, rename, step_of, sweep
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.checkpoint.parts import Piece, manifest_text, write_part
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import attempt, on_first, value_of
from mpitrain.errors import CheckpointError, DamagedError, MissingError, MpitrainError, StorageError, print_warning
from mpitrain.files import disk
from mpitrain.files.disk import FOLDER_MODE, storage_error


class Alone:
    """The channel of a program that runs without MPI."""
    rank, size = 0, 1

    def gather_objects(self, value: Any, /) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, /) -> Any:
        return value


ALONE = Alone()

@dataclass(frozen=True)
class Purpose:
    """The purpose of a checkpoint, in the words of `latest`: on passing damaged ones over, and if there is none."""
    doing: str
    missing: str


READ = Purpose("reading", "there is no checkpoint in this folder; it must be that of a run's checkpoints")
RESUME = Purpose("resuming from", "there is no checkpoint to resume from; start the run without --resume")
EVALUATE = Purpose("evaluating", "there is no checkpoint to evaluate; train the run until it has saved one")
REWIND = Purpose("going back to", "there is no checkpoint to go back to; resume with train.on_nan = \"skip\"")
START = Purpose("model.init_from: starting from", "model.init_from names neither a run folder nor a folder of checkpoints")


# ---- saving ----------------------------------------------------------------------------------------------------------

def save(folder: Path, step: int, pieces: Sequence[Piece], meta: Mapping[str, Any], channel: Objects = ALONE) -> Path:
    """Write `folder/step-N` and return it once it is on the disk, verified. Called by every rank; it communicates.

    A rank with pieces writes the part file of its number; a rank without writes nothing. `meta` (rank 0's) is any JSON with
    finite numbers. If one rank fails, every rank raises that error, and earlier checkpoints stay as they were.
    """
    saving = Save(folder, step, meta, channel)
    saving.begin(lambda: pieces)
    while not saving.done:
        saving.work()
        saving.agree()
    return saving.final


class Save:
    """One checkpoint on its way to the disk: `begin`, then `work` and `agree` in turns until `done`.

        every rank   begin: takes its pieces   work: writes its part   agree: gathers    work: -           agree: learns of it
        rank 0       and makes the folder                              the parts         work: publishes

    `begin` and `agree` communicate, and every rank calls them alike; an error of one rank is raised on every rank there. `work`
    does not, so another thread may do it. Rank 0 calls `before()`, which may refuse, before it makes anything and ahead of the
    rename, and `after(path)` at the end of its work.
    """

    def __init__(self, folder: Path, step: int, meta: Mapping[str, Any], channel: Objects, *,
                 before: Callable[[], object] | None = None, after: Callable[[Path], object] | None = None):
        self.final, self.step, self.channel = folder / f"step-{step:08d}", step, channel
        self.before, self.after = before, after
        self.meta = json.loads(json.dumps(dict(meta)))    # a copy: training goes on and may change what it names
        self.seconds = 0.0                                # of work: the slowest rank's part, and the publication
        self.nbytes = 0                                   # of all parts
        self.done = False
        self._parts: list[dict[str, Any] | None] | None = None
        self._outcome: dict[str, Any] = {}
        self._error: BaseException | None = None

    @property
    def is_publishing(self) -> bool:
        """Whether all parts are written."""
        return self._parts is not None

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.array.nbytes for piece in self._pieces)

    def begin(self, take: Callable[[], Sequence[Piece]]) -> None:
        """`take()` gives this rank's pieces. When this returns, every rank has them."""
        self._work = self.final

        def start() -> str:
            self._pieces = take()
            if self.channel.rank != 0:
                return ""
            if self.before is not None:
                self.before()                             # a folder that was removed is not made again
            return _open_work(self.final)
        with self._cleared():
            names = [value_of(outcome) for outcome in self.channel.gather_objects(self._attempt(start))]
        self._work = self.final.with_name(names[0])

    def work(self) -> None:
        """This rank's part; then, on rank 0, the publication. It raises nothing: `agree` does."""
        began = time.perf_counter()
        try:
            self._outcome = self._attempt(self._write if self._parts is None else self._finish)
        except BaseException as error:
            self._error = error
        self._took = time.perf_counter() - began

    def agree(self) -> None:
        """The outcome of `work`, on all ranks."""
        with self._cleared():
            if self._error is not None:
                raise self._error                         # not one of ours, and this rank's alone
            if self._parts is None:
                everyone = self.channel.gather_objects([self._outcome, self._took])
                self._parts = [value_of(outcome) for outcome, _ in everyone]
                self.seconds = max(seconds for _, seconds in everyone)
                self.nbytes = sum(part["size"] for part in self._parts if part is not None)
            else:
                outcome, seconds = self.channel.broadcast_object([self._outcome, self._took])
                value_of(outcome)
                self.seconds += seconds
                self.done = True

    def _attempt(self, action: Callable[[], Any]) -> dict[str, Any]:
        """`attempt`, which also knows what the operating system refuses where no code of ours expects it."""
        def act() -> Any:
            try:
                return action()
            except OSError as error:
                raise storage_error(error, "saving a checkpoint", self._work) from error
        outcome = attempt(act)
        if "error" in outcome and self.channel.rank == 0 and self.before is not None:
            refusal = attempt(self.before)                # if the folder is lost, this says more than what failed in it
            return refusal if "error" in refusal else outcome
        return outcome

    def _write(self) -> dict[str, Any] | None:
        if self.channel.rank == 0:
            sweep(self.final.parent, but=self._work.name)
        return write_part(self._work, self.channel.rank, self._pieces)

    def _finish(self) -> None:
        if self.channel.rank == 0:
            assert self._parts is not None
            _publish(self._work, self.final, self.step, self.meta, self._parts, self.before)
            if self.after is not None:
                self.after(self.final)

    @contextlib.contextmanager
    def _cleared(self) -> Iterator[None]:
        """After an error rank 0 removes what was written."""
        try:
            yield
        except BaseException:
            if self.channel.rank == 0 and self._work != self.final:
                with contextlib.suppress(MpitrainError, OSError):     # the first error counts; the next save cleans up
                    remove_ours(self._work)
            raise


def _open_work(final: Path) -> str:
    disk.make_folder(final.parent)
    work = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    try:
        os.mkdir(work, FOLDER_MODE)                      # not synced: its name is not the final one
    except OSError as error:
        raise storage_error(error, "making the folder", work) from error
    return work.name


def _publish(work: Path, final: Path, step: int, meta: Mapping[str, Any], parts: Sequence[dict[str, Any] | None],
             before: Callable[[], object] | None) -> None:
    """Write the manifest of everyone's parts, read it again, and give the folder its final name."""
    text = manifest_text(step, meta, parts)
    disk.write_file(work / MANIFEST, [text.encode()])
    disk.sync_folder(work)
    load(work)                                            # a hole, an overlap, a wrong size: nothing like it is published
    if before is not None:
        before()
    if final.is_dir():                                    # a checkpoint of this step, perhaps damaged, steps aside
        rename(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
    rename(work, final)
    disk.sync_folder(final.parent)
    sweep(final.parent)


# ---- choosing and deleting -------------------------------------------------------------------------------------------

def latest(folder: Path, channel: Objects = ALONE, purpose: Purpose = READ, *,
           warn: Callable[[str], None] | None = None) -> Checkpoint:
    """The newest checkpoint that verifies. Called by every rank; it communicates: rank 0 reads and decides.

    Damaged ones are passed over with one warning that names them, which `warn` gets (default: it is printed). MissingError if
    there is none at all, DamagedError listing what was tried if none is whole: a run never starts again from step 0 by
    itself.
    """
    name = on_first(channel, lambda: _newest_whole(folder, purpose, warn or print_warning))
    return load(folder / name)


def _newest_whole(folder: Path, purpose: Purpose, warn: Callable[[str], None]) -> str:
    if folder.is_file():
        raise MissingError(purpose.missing, file=folder)
    bad: list[str] = []
    for path in candidates(folder, links=True):
        if why := damage(path):
            bad.append(f"{path.name}: {why}")
            continue
        if bad:
            warn(f"{purpose.doing} {path.name}: newer checkpoints cannot be used ({'; '.join(bad)})")
        return path.name
    if bad:
        raise DamagedError(f"none of the checkpoints is whole; tried {'; '.join(bad)}", file=folder)
    raise MissingError(purpose.missing, file=folder)


def newest_whole_since(folder: Path, step: int) -> int:
    """The step of the newest checkpoint that verifies, of those of `step` and later ones; 0 if there is none. Rank 0 calls it."""
    return next((step_of(path) for path in candidates(folder) if step_of(path) >= step and not damage(path)), 0)


def refuse_damage(text: str) -> None:
    """The `warn` of a run that would rather not go on from an older checkpoint."""
    raise CheckpointError(f"--strict: {text}; without --strict the run goes on from there")


def named_rightly(found: Checkpoint) -> Checkpoint:
    """The checkpoint, if it is the one that its folder's name says. A folder that was renamed would pass for a newer one."""
    if found.step != step_of(found.folder):
        raise CheckpointError(f"the manifest is that of step {found.step}: the folder was renamed", file=found.folder)
    return found


def prune(folder: Path, keep: int, *, best: int | None = None, verified: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and that of step `best`; returns the deleted ones. Rank 0 calls it.

    Nothing is deleted unless one of the remaining ones is whole: `verified` (returned by `save`) is known to be, otherwise
    they are read. A folder that holds a file of someone else's is left alone.
    """
    assert keep >= 1, "the last checkpoint is never deleted"
    paths = candidates(folder)
    stay = [path for i, path in enumerate(paths) if i < keep or step_of(path) == best]
    go = [path for path in paths if path not in stay and holds_only_ours(path)]
    if not go or not (verified in stay or not all(map(damage, stay))):
        return []
    for path in reversed(go):                             # oldest first
        discard(path)
    return go


def damage(path: Path) -> str:
    """What is wrong with a checkpoint; nothing where it verifies."""
    if path.is_symlink():
        return "it is a symbolic link, which no run makes; put the folder itself there"
    try:
        named_rightly(load(path)).verify()
    except (CheckpointError, StorageError) as error:
        return str(error)
    return ""
