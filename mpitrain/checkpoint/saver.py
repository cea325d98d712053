"""The checkpoints of a run, written by a thread of each rank while the run trains on.

    training   .. step | copy | step | step | gather | step | learn of it | step ..
    thread               [this rank's part         ] [rank 0: publish, prune]

Training stands still while its arrays are copied. Then a thread writes the copies. MPI is called by the training thread alone:
the ranks add up, with a sum that each step has anyway, whether all threads are done, and only then go on together.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend.memory import available
from mpitrain.checkpoint.folders import candidates, step_of
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.store import Save
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import attempt, value_of
from mpitrain.errors import AccessError, OutputError, StorageError

# A thread that writes many bytes hashes and copies for as long as a step takes. Where every core trains, it would take half of
# one; at this priority it gets 3 % of it (Linux gives niceness 15 a weight of 36 beside 1024), and the whole of an idle core.
NICENESS, LARGE = 15, 16 << 20
ROOM = 0.5               # the part of the available memory that copies may take: evaluation and the file cache need some, too
LINE = 64                # bytes; copies begin on cache lines


class Saved(NamedTuple):
    """A checkpoint that is on the disk. Equal on all ranks, but for `still_s`."""

    step: int
    still_s: float       # the time that this rank's training stood still for it
    seconds: float       # the time that writing took
    nbytes: int


class Saver:
    """Writes the checkpoints of a run to `folder`; every rank has one and calls it alike.

    `take(step)` gives this rank's pieces, in place. `about(meta)` completes the meta that `start` gets. `published(meta, path)`
    is called on rank 0, by the writing thread, once a checkpoint has its name, and `fence()` just before, which may refuse it.
    `tell` shows a line. A failed save raises on all ranks, unless `goes_on`: then it is told, and the next one may succeed.
    """

    def __init__(self, folder: Path, channel: Objects, take: Callable[[int], Sequence[Piece]], *, asynchronous: bool = True,
                 goes_on: bool = False, fence: Callable[[], object] | None = None,
                 published: Callable[[Mapping[str, Any], Path], None] | None = None,
                 about: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict, tell: Callable[[str], None] = lambda text: None):
        self.folder, self.channel, self.take, self.about, self.tell = folder, channel, take, about, tell
        self.fence, self.published = fence, published
        self.asynchronous, self.goes_on = asynchronous, goes_on
        self.all: list[Saved] = []
        self._snapshot: Snapshot | None = None
        self._save: Save | None = None
        self._at_once = False
        self._still_s = 0.0
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way to the disk; the same on all ranks."""
        return self._save is not None

    @property
    def ready(self) -> bool:
        """Whether this rank's thread has nothing to do. Where that is so on all ranks, `advance` waits for nobody."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, step: int, meta: Mapping[str, Any], *, at_once: bool = False, since: float | None = None) -> None:
        """Begins the checkpoint of a step, the last one being finished; it communicates.

        `at_once` writes it before anything else happens, without a copy: nothing will be trained meanwhile. Training stands
        still since `since` (a time.perf_counter; default: now).
        """
        assert not self.busy, "finish the last checkpoint first"
        self._still_s, self._at_once = 0.0, at_once
        with self._standing_still(since):
            if self.asynchronous and not at_once and self._snapshot is None:
                self._agree_on_room(step)
            after = None if self.published is None else partial(self.published, meta)
            self._save = save = Save(self.folder, step, self.about(meta), self.channel, before=self.fence, after=after)
            with self._going_on(save):
                save.begin(lambda: self._taken(step))
                self._work(save)

    def advance(self) -> int | None:
        """The next stage of the checkpoint that is being written; the step of one that is done. It communicates."""
        save = self._save
        assert save is not None
        with self._standing_still(), self._going_on(save):
            save.agree()
            if not save.done:
                self._work(save)
                return None
        if self._save is None:                                # it has failed, and training goes on
            return None
        self._save = None
        self.all.append(Saved(save.step, self._still_s, save.seconds, save.nbytes))
        self.tell(f"step {save.step}  saved; training stood still for {self._still_s:.3f} s")
        return save.step

    def finish(self) -> int | None:
        """Waits for the checkpoint that is being written, if there is one; its step. It communicates."""
        step = None
        while self.busy:
            if self._thread is not None:
                with self._standing_still():
                    self._thread.join()
            step = self.advance()
        return step

    def newest(self) -> int | None:
        """The step of the newest checkpoint that is on the disk."""
        return next(map(step_of, candidates(self.folder)), None)

    def close(self) -> None:
        """After a failure: what is being written stays unfinished, but a publication, which is short, is waited for a moment."""
        if self._save is not None and self._save.is_publishing and self._thread is not None:
            self._thread.join(1.0)

    def wait(self) -> None:
        """Returns when this rank's thread writes nothing any more. It does not communicate."""
        if self._thread is not None:
            self._thread.join()

    def save_s(self) -> float:
        """The seconds that the last save took; 0 before the first."""
        return self.all[-1].seconds if self.all else 0.0

    def times(self) -> dict[str, Any]:
        """The times of all saves, for run.json."""
        still = [saved.still_s for saved in self.all]
        return {"saved": len(still), "still_s": round(sum(still), 6), "longest_still_s": round(max(still, default=0.0), 6),
                "seconds": round(sum(saved.seconds for saved in self.all), 6)}

    # -- what a stage needs --------------------------------------------------------------------------------------------

    @property
    def _in_background(self) -> bool:
        return self.asynchronous and not self._at_once

    def _taken(self, step: int) -> Sequence[Piece]:
        pieces = self.take(step)
        return self._snapshot.of(pieces) if self._in_background and self._snapshot is not None else pieces

    def _agree_on_room(self, step: int) -> None:
        """Memory for the copies; where a host lacks it, checkpoints are written while training waits, on all ranks."""
        def need() -> list[Any]:
            return [socket.gethostname(), sum(piece.array.nbytes for piece in self.take(step)), available()]
        found = [value_of(outcome) for outcome in self.channel.gather_objects(attempt(need))]
        for host in dict.fromkeys(host for host, _, _ in found):
            wanted = sum(nbytes for name, nbytes, _ in found if name == host)
            left = min(room for name, _, room in found if name == host)
            if wanted > ROOM * left:
                self.asynchronous = False
                self.tell(f"training waits for its checkpoints: a copy of the {wanted >> 20} MiB that {host} writes does not fit "
                          f"in the {left >> 20} MiB of memory that are free there")
                return
        self._snapshot = Snapshot()

    def _work(self, save: Save) -> None:
        """The present stage of a save, by a thread if there is something to do."""
        self._thread = None
        if not self._in_background or (save.is_publishing and self.channel.rank != 0):
            save.work()
            return
        thread = threading.Thread(target=_write, args=(save,), name="mpitrain-checkpoint", daemon=True)
        thread.start()
        self._thread = thread                                 # one that Ctrl-C kept from starting is never waited for

    @contextlib.contextmanager
    def _standing_still(self, since: float | None = None) -> Iterator[None]:
        began = time.perf_counter() if since is None else since
        try:
            yield
        finally:
            self._still_s += time.perf_counter() - began

    @contextlib.contextmanager
    def _going_on(self, save: Save) -> Iterator[None]:
        """Tells of a checkpoint that could not be written, where training goes on all the same."""
        try:
            yield
        except (StorageError, AccessError, OutputError) as error:
            if not self.goes_on or self._at_once:
                raise
            self._save = None
            last = f"the checkpoint of step {self.all[-1].step} stands" if self.all else "this run has saved none yet"
            self.tell(f"step {save.step}  not saved, and training goes on ({last}): {error}")


def _write(save: Save) -> None:
    """A stage of a save, in a thread of its own."""
    if save.own_bytes >= LARGE and not save.is_publishing and sys.platform == "linux":
        with contextlib.suppress(OSError):                    # on Linux this is the priority of the thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    save.work()


class Snapshot:
    """Memory for copies of this rank's pieces, kept from one checkpoint to the next: new pages take longer than the copy.

    It is not NumPy's, so that it counts as nothing that a step needs.
    """

    def __init__(self) -> None:
        self._layout: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._views: list[np.ndarray] = []

    def of(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with copies of their arrays, which hold until the next call."""
        layout = [(piece.array.shape, piece.array.dtype) for piece in pieces]
        if layout != self._layout:
            self._views, self._layout = arrays(layout), layout
        for piece, view in zip(pieces, self._views, strict=True):
            np.copyto(view, piece.array)
        return [Piece(piece.name, view, piece.global_shape, piece.start) for piece, view in zip(pieces, self._views, strict=True)]


def arrays(layout: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes, one after the other in one piece of memory. MemoryError if there is none."""
    sizes = [-(-dtype.itemsize * int(np.prod(shape, dtype=np.int64)) // LINE) * LINE for shape, dtype in layout]
    try:
        memory = mmap.mmap(-1, max(sum(sizes), LINE))
    except OSError as error:
        raise MemoryError(f"a copy of {sum(sizes)} bytes for a checkpoint; set checkpoint.asynchronous = false") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):                    # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)                # one fault for 2 MiB
    starts = np.cumsum([0, *sizes])
    return [np.ndarray(shape, dtype, memory, int(start)) for (shape, dtype), start in zip(layout, starts)]
