"""Checkpoints written by a thread: the values of their step, nothing published too early, errors on every rank, equal files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint import ThreadChannel, on_ranks

from mpitrain.checkpoint import folders, saver, store
from mpitrain.checkpoint.manifest import load
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.saver import Saver
from mpitrain.checkpoint.store import Alone
from mpitrain.errors import StorageError
from mpitrain.files import hdf5_file

DEADLINE = 30


class Gate:
    """The writer waits in `write_hdf5` until the gate is open; `fail` says what happens then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        self.fail: Callable[[Path], BaseException | None] = lambda path: None
        write = hdf5_file.write_hdf5

        def waiting(path: Path, arrays: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(DEADLINE)
            error = self.fail(path)
            if error is not None:
                raise error
            return write(path, arrays)
        monkeypatch.setattr(hdf5_file, "write_hdf5", waiting)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def weights(folder: Path, step: int) -> list[float]:
    found: list[float] = load(folder / f"step-{step:08d}").read("w").tolist()
    return found


def saver_of(folder: Path, values: np.ndarray, channel: Any = None, **options: Any) -> Saver:
    rank = channel.rank if channel else 0
    return Saver(folder, channel or Alone(), lambda step: [Piece.whole("w" if rank == 0 else f"w{rank}", values)], **options)


# ---- what is written -------------------------------------------------------------------------------------------------

def test_a_checkpoint_has_the_values_of_its_step_though_training_changes_them_before_they_are_written(
        tmp_path: Path, gate: Gate) -> None:
    values = np.ones(5)
    made = saver_of(tmp_path, values)
    made.start(1, {})
    assert gate.reached.wait(DEADLINE) and made.busy and not made.ready     # it returned; the writer has not begun
    values[:] = 2.0
    assert folders.candidates(tmp_path) == []
    gate.opened.set()
    assert made.finish() == 1 and not made.busy
    assert weights(tmp_path, 1) == [1.0] * 5
    made.start(2, {})
    values[:] = 3.0
    assert made.finish() == 2
    assert weights(tmp_path, 2) == [2.0] * 5


def test_copies_of_views_with_gaps_and_of_several_dtypes_are_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 8)).astype(np.float32)
    arrays = {"a": whole[::2, 1:], "b": np.asfortranarray(whole), "c": np.array(3, np.int64), "d": np.zeros((0, 2), np.float16),
              "e": whole.astype(">f8")}
    made = Saver(tmp_path, Alone(), lambda step: [Piece.whole(name, array) for name, array in arrays.items()])
    for step in (1, 2):
        made.start(step, {})
        made.finish()
        found = load(tmp_path / f"step-{step:08d}")
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.read(name), array)


def test_copies_go_to_the_same_memory_each_time_and_to_new_memory_for_other_shapes() -> None:
    copies = saver.Snapshot()
    first = copies.of([Piece.whole("w", np.ones(3)), Piece.whole("v", np.ones((2, 2), np.float32))])
    again = copies.of([Piece.whole("w", np.zeros(3)), Piece.whole("v", np.zeros((2, 2), np.float32))])
    assert all(a.array is b.array for a, b in zip(first, again)) and not any(piece.array.any() for piece in again)
    assert all(piece.array.ctypes.data % 64 == 0 for piece in first)
    (other,) = copies.of([Piece.whole("w", np.ones(4))])
    assert other.array is not first[0].array and other.array.tolist() == [1.0] * 4


def test_the_files_are_those_of_a_save_that_training_waits_for(tmp_path: Path) -> None:
    def write(channel: ThreadChannel, name: str, asynchronous: bool) -> None:
        made = saver_of(tmp_path / name, np.arange(4.0) + channel.rank, channel, asynchronous=asynchronous)
        for step in (3, 6):
            made.start(step, {"best": None, "lr": 0.1})
            made.finish()
    for name, asynchronous in (("waiting", False), ("asynchronous", True)):
        assert on_ranks(3, lambda channel: write(channel, name, asynchronous)) == [None] * 3     # noqa: B023
    files = sorted(path.relative_to(tmp_path / "waiting") for path in (tmp_path / "waiting").rglob("*") if path.is_file())
    assert len(files) == 8                                                  # two manifests, three parts each
    for file in files:
        assert (tmp_path / "waiting" / file).read_bytes() == (tmp_path / "asynchronous" / file).read_bytes()


# ---- when it is published --------------------------------------------------------------------------------------------

def test_it_is_published_once_every_rank_has_written_and_not_before(tmp_path: Path, gate: Gate) -> None:
    def work(channel: ThreadChannel) -> list[int]:
        seen = []
        made = saver_of(tmp_path, np.ones(2), channel, published=lambda meta, path: seen.append(load(path).step))
        made.start(4, {})
        if channel.rank == 1:
            gate.reached.wait(DEADLINE)
            gate.opened.set()
        before = len(folders.candidates(tmp_path))
        assert made.finish() == 4
        return [before, len(folders.candidates(tmp_path)), *seen]
    found = on_ranks(2, work)
    assert [one[1:] for one in found] == [[1, 4], [1]] and found[0][0] == 0


def test_the_meta_is_that_of_the_step_though_it_changes_later(tmp_path: Path, gate: Gate) -> None:
    made, choices = saver_of(tmp_path, np.ones(1)), {"bounds": [1, 2]}
    made.start(1, {"choices": choices})
    choices["bounds"].append(3)
    gate.opened.set()
    made.finish()
    assert load(tmp_path / "step-00000001").meta == {"choices": {"bounds": [1, 2]}}


def test_the_time_that_training_stood_still_is_told_and_is_not_that_of_writing(tmp_path: Path, gate: Gate) -> None:
    told: list[str] = []
    made = saver_of(tmp_path, np.ones(1), tell=told.append)
    made.start(1, {})
    assert gate.reached.wait(DEADLINE)
    still = made._still_s
    gate.opened.set()
    while not made.ready:
        pass
    made.advance()
    while not made.ready:
        pass
    assert made.advance() == 1
    (saved,) = made.all
    assert still <= saved.still_s and saved.seconds > 0 and saved.nbytes > 8
    assert told == [f"step 1  saved; training stood still for {saved.still_s:.3f} s"]
    assert made.times()["saved"] == 1


# ---- errors ----------------------------------------------------------------------------------------------------------

def no_space(path: Path) -> StorageError:
    return StorageError("writing failed: No space left on device (ENOSPC)", file=path, offset=8)


def test_an_error_of_one_ranks_thread_is_raised_on_every_rank_and_the_old_checkpoint_stays(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    on_ranks(3, lambda channel: store.save(tmp_path, 1, [Piece.whole(f"w{channel.rank}", np.ones(1))], {}, channel))
    gate.fail = lambda path: no_space(path) if path.name == "part-00001.h5" else None

    def work(channel: ThreadChannel) -> None:
        made = saver_of(tmp_path, np.ones(2), channel)
        made.start(2, {})
        made.finish()
    for error in on_ranks(3, work):
        assert isinstance(error, StorageError) and error.exit_code == 74 and str(error.file).endswith("part-00001.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] and store.latest(tmp_path).step == 1


def test_training_goes_on_after_a_failed_save_where_that_is_wanted_and_says_so_each_time(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()

    def work(channel: ThreadChannel) -> list[str]:
        told: list[str] = []
        made = saver_of(tmp_path, np.ones(2), channel, goes_on=True, tell=told.append)
        for step in (1, 2, 3, 4):
            gate.fail = (lambda path: no_space(path)) if step in (1, 3) else (lambda path: None)
            channel.gather_objects(None)
            made.start(step, {})
            assert made.finish() == (None if step in (1, 3) else step) and not made.busy
            channel.gather_objects(None)
        return told
    for told in on_ranks(2, work):
        assert told[0].startswith("step 1  not saved, and training goes on (this run has saved none yet): ")
        assert "ENOSPC" in told[0]
        assert told[2].startswith("step 3  not saved, and training goes on (the checkpoint of step 2 stands): ")
        assert told[1].startswith("step 2  saved") and told[3].startswith("step 4  saved") and len(told) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_the_last_checkpoint_of_a_run_must_be_written_wherever_training_would_go_on(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    gate.fail = no_space
    made = saver_of(tmp_path, np.ones(2), goes_on=True)
    with pytest.raises(StorageError, match="ENOSPC"):
        made.start(1, {}, at_once=True)
        made.finish()


def test_an_error_that_is_a_bug_is_raised_and_not_gone_on_from(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    gate.fail = lambda path: ZeroDivisionError("a bug")
    made = saver_of(tmp_path, np.ones(2), goes_on=True)
    made.start(1, {})
    with pytest.raises(ZeroDivisionError, match="a bug"):
        made.finish()
    assert folders.candidates(tmp_path) == []


def test_where_memory_has_no_room_for_copies_training_waits_and_it_is_said_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "available", lambda: 100)

    def work(channel: ThreadChannel) -> tuple[Sequence[str], list[bool]]:
        told: list[str] = []
        made, writing = saver_of(tmp_path, np.ones(20), channel, tell=told.append), []
        for step in (1, 2):
            made.start(step, {})
            writing.append(made.ready)
            made.finish()
        return told, writing
    for told, writing in on_ranks(2, work):
        assert writing == [True, True]                                      # no thread was started
        assert "training waits for its checkpoints: a copy of the" in told[0] and len(told) == 3
    assert weights(tmp_path, 2) == [1.0] * 20
