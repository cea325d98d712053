"""Checkpoints: what is saved by any layout of ranks is read back by any other, and nothing damaged is ever used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpitrain.checkpoint import folders, manifest
from mpitrain.checkpoint.folders import candidates
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.store import EVALUATE, READ, RESUME, START, Piece, Purpose, latest, prune, save
from mpitrain.errors import CheckpointError, MissingError, ShapeError, StorageError
from mpitrain.files import hdf5_file
from mpitrain.run.resuming import continues


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"parameters/blocks.0.weight": rng.standard_normal((6, 4)).astype(np.float32),
            "parameters/scale": np.array(rng.random()), "buffers/norm.count": rng.integers(0, 9, 3),
            "optimizer/m/blocks.0.weight": rng.standard_normal((6, 4)), "buffers/none": np.zeros((0, 2), np.float32)}


def save_model(folder: Path, step: int, seed: int = 0, **meta: Any) -> Path:
    return save(folder, step, [Piece.whole(name, array) for name, array in model(seed).items()], meta)


class ThreadChannel:
    """Ranks as threads of this process; objects go through JSON, as they do over MPI."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]):
        self.rank, self.size, self._barrier, self._table = rank, size, barrier, table

    def gather_objects(self, value: Any) -> list[Any]:
        self._table[self.rank] = json.dumps(value)
        self._barrier.wait(30)
        values = [json.loads(text) for text in self._table]
        self._barrier.wait(30)
        return values

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


def on_ranks(size: int, work: Callable[[ThreadChannel], Any]) -> list[Any]:
    """The result of `work`, or the exception it raised, on each of `size` ranks."""
    barrier, table = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadChannel(rank, size, barrier, table))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- what is saved is read back --------------------------------------------------------------------------------------

def test_a_checkpoint_gives_back_every_bit_name_dtype_and_the_meta(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "run" / "checkpoints", 100, lr=0.1, config={"a": [1, 2]})
    assert folder == tmp_path / "run" / "checkpoints" / "step-00000100"
    assert sorted(os.listdir(folder)) == ["manifest.json", "part-00000.h5"]
    stored = load(folder)
    stored.verify()
    assert (stored.step, stored.meta) == (100, {"lr": 0.1, "config": {"a": [1, 2]}})
    assert list(stored.arrays) == list(model())
    for name, array in model().items():
        back = stored.read(name)
        assert (back.dtype, back.shape) == (array.dtype, array.shape) and back.tobytes() == array.tobytes()
        back[...] = 0                                                       # the reader's own, not a view of something shared


def test_h5py_reads_a_part_by_its_names(tmp_path: Path) -> None:
    with h5py.File(save_model(tmp_path, 1) / "part-00000.h5", "r") as file:
        for name, array in model().items():
            np.testing.assert_array_equal(file[name][()], array)


def test_reading_does_not_use_libhdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, 1)
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("libhdf5 was asked"))
    stored = latest(tmp_path)
    assert stored.folder == folder and stored.read("parameters/scale") == model()["parameters/scale"]


def test_meta_with_integer_keys_and_tuples_is_stored_as_json_has_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, [], {"table": {10: 1, 2: (3, 4)}})
    assert load(folder).meta == {"table": {"10": 1, "2": [3, 4]}}


def cut(length: int, n: int) -> list[int]:
    return [i * length // n for i in range(n + 1)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 7), columns=st.integers(1, 5), grid=st.tuples(st.integers(1, 3), st.integers(1, 2)), data=st.data())
def test_any_slice_is_put_together_from_the_parts_of_any_layout(
        rows: int, columns: int, grid: tuple[int, int], data: st.DataObject, tmp_path: Path) -> None:
    whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    a, b = cut(rows, grid[0]), cut(columns, grid[1])

    def write(channel: ThreadChannel) -> Path:
        i, j = divmod(channel.rank, grid[1])
        mine = whole[a[i]:a[i + 1], b[j]:b[j + 1]]
        return save(tmp_path, 1, [Piece("w", mine, whole.shape, (a[i], b[j]))], {}, channel)

    stored = load(on_ranks(grid[0] * grid[1], write)[0])
    assert len(stored.parts) == grid[0] * grid[1]
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    height, width = data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left))
    part = stored.read("w", (top, left), (height, width))
    np.testing.assert_array_equal(part, whole[top:top + height, left:left + width])
    np.testing.assert_array_equal(stored.read("w"), whole)
    shutil.rmtree(stored.folder)


def test_a_slice_is_named_with_its_place_in_the_part_file(tmp_path: Path) -> None:
    whole = np.arange(12.0).reshape(4, 3)
    pieces = [Piece("w", whole[:2], (4, 3), (0, 0)), Piece("w", whole[2:], (4, 3), (2, 0))]
    with h5py.File(save(tmp_path, 1, pieces, {}) / "part-00000.h5", "r") as file:
        assert set(file) == {"w[0:2,0:3]", "w[2:4,0:3]"}
        np.testing.assert_array_equal(file["w[2:4,0:3]"][()], whole[2:])


def test_a_rank_without_pieces_leaves_no_file(tmp_path: Path) -> None:
    def write(channel: ThreadChannel) -> Path:
        return save(tmp_path, 5, [Piece.whole("w", np.ones(3))] if channel.rank == 0 else [], {"of": channel.rank}, channel)

    folders = on_ranks(3, write)
    assert folders == [tmp_path / "step-00000005"] * 3
    assert sorted(os.listdir(folders[0])) == ["manifest.json", "part-00000.h5"]
    assert load(folders[0]).meta == {"of": 0}


def test_a_slice_outside_the_array_is_refused(tmp_path: Path) -> None:
    stored = load(save_model(tmp_path, 1))
    with pytest.raises(ShapeError, match=r"slice of shape \(3, 4\) from \(4, 0\) is not inside the stored shape \(6, 4\)"):
        stored.read("parameters/blocks.0.weight", (4, 0), (3, 4))


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'has no array "parameters/scales" \(did you mean "parameters/scale"\?\)'):
        load(save_model(tmp_path, 1)).read("parameters/scales")


# ---- saving fails ----------------------------------------------------------------------------------------------------

@pytest.mark.promise("B2")
def test_the_error_of_one_rank_is_raised_on_every_rank_and_nothing_is_published(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hdf5 = hdf5_file.write_hdf5

    def failing(path: Path, arrays: Any) -> Any:
        if path.name == "part-00001.h5":
            raise StorageError("writing failed: No space left on device (ENOSPC)", file=path, offset=8)
        return write_hdf5(path, arrays)

    monkeypatch.setattr(hdf5_file, "write_hdf5", failing)
    save(tmp_path, 1, [Piece.whole("w", np.ones(1))], {})
    results = on_ranks(3, lambda channel: save(tmp_path, 2, [Piece.whole(f"w{channel.rank}", np.ones(2))], {}, channel))
    for error in results:
        assert isinstance(error, StorageError) and "ENOSPC" in str(error)
        assert error.file is not None and error.file.endswith("part-00001.h5") and error.offset == 8
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_the_error_of_rank_0_while_publishing_is_raised_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, to: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", failing)
    results = on_ranks(2, lambda channel: save(tmp_path, 2, [Piece.whole(f"w{channel.rank}", np.ones(2))], {}, channel))
    assert [type(error) for error in results] == [StorageError] * 2
    assert "renaming a checkpoint failed: Input/output error" in str(results[1]) and os.listdir(tmp_path) == []


def test_a_folder_that_one_node_does_not_see_is_explained(tmp_path: Path) -> None:
    def write(channel: ThreadChannel) -> Path:
        return save(tmp_path / f"node{channel.rank}", 1, [Piece.whole(f"w{channel.rank}", np.ones(2))], {}, channel)

    for error in on_ranks(2, write):
        assert isinstance(error, StorageError) and "must be on a file system that all nodes share" in str(error)


def test_pieces_that_leave_a_hole_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="w: the pieces hold 4 of 6 values"):
        save(tmp_path, 1, [Piece("w", np.ones(4), (6,), (0,))], {})
    assert candidates(tmp_path) == []


@pytest.mark.promise("B4")
def test_data_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of fsync and rename that survives a power cut: files, their folder, rename, the parent."""
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition(".tmp-")[0])
        fsync(fd)

    def record_rename(path: Path, to: Path) -> None:
        done.append(f"rename to {Path(to).name}")
        rename(path, to)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(tmp_path / "c", 1, [Piece.whole("w", np.ones(2))], {})
    assert done[-5:] == ["fsync part-00000.h5", "fsync manifest.json", "fsync step-00000001", "rename to step-00000001",
                         "fsync c"]


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save_model(tmp_path, 3, seed=0)
    stored = load(save_model(tmp_path, 3, seed=1))
    np.testing.assert_array_equal(stored.read("parameters/scale"), model(1)["parameters/scale"])
    assert os.listdir(tmp_path) == ["step-00000003"]


@pytest.mark.promise("B1")
def test_a_checkpoint_that_stepped_aside_for_a_save_that_was_killed_is_found_and_put_back(tmp_path: Path) -> None:
    save_model(tmp_path, 3).rename(tmp_path / "step-00000003.old-0123abcd")
    assert latest(tmp_path).step == 3
    save_model(tmp_path, 4)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


@pytest.mark.promise("B1", "B12")
def test_what_a_killed_save_left_is_cleared_by_the_next_but_nothing_else(tmp_path: Path) -> None:
    for name in ("step-00000001.tmp-0123abcd", "step-00000001.tmp-mine", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.h5").touch()
    save_model(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000001.tmp-mine", "step-00000002"]


# ---- another model ---------------------------------------------------------------------------------------------------

@pytest.mark.promise("B10")
def test_a_checkpoint_of_another_model_lists_missing_unexpected_and_reshaped_names(tmp_path: Path) -> None:
    stored = load(save_model(tmp_path, 1))
    fitting = {name: (array.shape, array.dtype) for name, array in model().items()}
    stored.check_names(fitting)
    stored.check_names({"buffers/norm.count": ((3,), "int64"), "buffers/none": ((0, 2), "float32")}, prefix="buffers/")
    other = {**fitting, "parameters/blocks.0.weight": ((6, 5), "float32"), "parameters/scale": ((), np.float32),
             **{f"parameters/new{i}": ((1,), np.float32) for i in range(4)}}
    del other["buffers/norm.count"]
    with pytest.raises(CheckpointError) as caught:
        stored.check_names(other)
    assert caught.value.message == (
        "the checkpoint is of another model: 4 missing (parameters/new0, parameters/new1, parameters/new2, ...); "
        "1 unexpected (buffers/norm.count); 2 reshaped (parameters/blocks.0.weight is float32[6,4] here and float32[6,5] in the "
        "model, parameters/scale is float64[] here and float32[] in the model); use the config it was saved with")


# ---- damaged and hostile checkpoints ---------------------------------------------------------------------------------

@pytest.mark.promise("B5")
def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = save_model(tmp_path, 1)
    rng = np.random.default_rng(0)
    for name in ("part-00000.h5", "manifest.json"):
        good = (folder / name).read_bytes()
        for position in rng.integers(0, len(good), 60):
            spoiled = bytearray(good)
            spoiled[position] ^= 1 << int(rng.integers(8))
            (folder / name).write_bytes(spoiled)
            try:
                with pytest.raises(CheckpointError):
                    load(folder).verify()
            except pytest.fail.Exception:                                   # only a change of JSON's white space means nothing
                assert name == "manifest.json" and json.loads(spoiled) == json.loads(good)
        (folder / name).write_bytes(good)


@pytest.mark.promise("B5")
def test_a_damaged_value_is_found_when_it_is_read_and_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path, 1)
    offset = load(folder).arrays["parameters/blocks.0.weight"].pieces[0].offset
    with open(folder / "part-00000.h5", "r+b") as file:
        file.seek(offset + 5)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="the values are damaged: sha256 .* of the manifest; use another") as caught:
        load(folder).read("parameters/blocks.0.weight")
    assert (caught.value.dataset, caught.value.offset) == ("parameters/blocks.0.weight", offset)
    with pytest.raises(CheckpointError, match="the file is damaged: sha256 .* part|the file is damaged: sha256"):
        load(folder).verify()


@pytest.mark.promise("B5")
def test_truncated_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path, 1)
    part = folder / "part-00000.h5"
    size = part.stat().st_size
    os.truncate(part, size - 1)
    with pytest.raises(CheckpointError, match=f"the file has {size - 1} bytes, its manifest says {size}: it is truncated"):
        load(folder)
    part.unlink()
    with pytest.raises(CheckpointError, match='part-00000.h5": the file is missing'):
        load(folder)
    part.symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="found a symbolic link"):
        load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match='manifest.json": the file is missing'):
        load(folder)
    with pytest.raises(MissingError, match="no checkpoint folder of this name"):
        load(tmp_path / "none")


@pytest.mark.promise("B5")
def test_a_file_truncated_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    stored = load(save_model(tmp_path, 1))
    os.truncate(stored.folder / "part-00000.h5", 100)
    with pytest.raises(CheckpointError, match="the file ends .* bytes early: it is truncated"):
        stored.read("parameters/blocks.0.weight")


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The checkpoint with its manifest edited by someone who knows how to sign it again."""
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256")
    edit(body)
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))
    return folder


def weight(body: dict[str, Any]) -> dict[str, Any]:
    return body["arrays"]["parameters/blocks.0.weight"]                     # type: ignore[no-any-return]


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path upwards": (lambda b: b["parts"][0].update(file="../part-00000.h5"), "not the name of a part"),
    "an absolute path": (lambda b: b["parts"][0].update(file="/dev/zero"), "not the name of a part"),
    "a part of a wrong type": (lambda b: b["parts"][0].update(file=["part-00000.h5"]), "not the name of a part"),
    "the same part twice": (lambda b: b["parts"].append(b["parts"][0]), "two parts have one name"),
    "an array name upwards": (lambda b: b["arrays"].update({"a/../b": weight(b)}), "not the name of an array"),
    "an array name with an escape": (lambda b: b["arrays"].update({"a\x1b[2J": weight(b)}), "not the name of an array"),
    "a huge shape": (lambda b: weight(b).update(shape=[1 << 40, 1 << 21]), "the pieces hold 24 of"),
    "a huge piece": (lambda b: (weight(b).update(shape=[1 << 40]), weight(b)["pieces"][0].update(shape=[1 << 40], start=[0])),
                     "behind the end of its file"),
    "the same bytes many times": (lambda b: b["arrays"].update({f"x{i}": weight(b) for i in range(10_000)}), "cannot hold"),
    "a negative offset": (lambda b: weight(b)["pieces"][0].update(offset=-8), "-8 is not a count"),
    "a true offset": (lambda b: weight(b)["pieces"][0].update(offset=True), "True is not a count"),
    "a fractional shape": (lambda b: weight(b).update(shape=[6.0, 4]), "6.0 is not a count"),
    "too many dims": (lambda b: weight(b).update(shape=[1] * 40), "is not a shape"),
    "a piece outside": (lambda b: weight(b)["pieces"][0].update(start=[1, 0]), "a piece lies outside the array"),
    "a part that is not there": (lambda b: weight(b)["pieces"][0].update(part=1), "there is no part 1"),
    "an object dtype": (lambda b: weight(b).update(dtype="object"), "dtype 'object'"),
    "a dtype of a wrong type": (lambda b: weight(b).update(dtype={}), "TypeError"),
    "a short digest": (lambda b: weight(b)["pieces"][0].update(sha256="00"), "not a SHA-256"),
    "arrays in a list": (lambda b: b.update(arrays=[]), "AttributeError"),
    "meta in a list": (lambda b: b.update(meta=[]), '"meta" is not an object'),
    "values that would fill the memory": (lambda b: b.update(more=[[]] * 700_000), "1,400,[0-9]+ commas and brackets in"),
    "no step": (lambda b: b.pop("step"), "KeyError"),
    "another format": (lambda b: b.update(format="x"), 'is not "mpitrain checkpoint"'),
    "a later version": (lambda b: b.update(version=2), "format version 2, this mpitrain reads 1"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.promise("F6", "F5")
def test_a_manifest_with(case: str, tmp_path: Path) -> None:
    edit, words = HOSTILE[case]
    folder = save_model(tmp_path, 1)
    load(edited(folder, lambda body: None))                                 # signed again as it was, it is fine
    with pytest.raises(CheckpointError, match=words) as caught:
        load(edited(folder, edit))
    assert caught.value.file == str(folder / "manifest.json") and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", [b"", b"null", b"[" * 100_000, b"\xff\xfe", b'{"format": "mpitrain checkpoint", "version": 1}',
                                  b"1" * 5000, b'{"a": 1e999}'])
def test_a_manifest_that_is_no_manifest_is_refused(text: bytes, tmp_path: Path) -> None:
    folder = save_model(tmp_path, 1)
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="the manifest is damaged|format version"):
        load(folder)


@pytest.mark.promise("F5")
def test_a_manifest_too_large_to_be_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, 1)
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 100)
    with pytest.raises(CheckpointError, match="the manifest has [0-9]+ bytes; at most 100 are read"):
        load(folder)


def test_pieces_that_overlap_and_leave_a_hole_are_refused_when_read(tmp_path: Path) -> None:
    pieces = [Piece("w", np.ones(2), (4,), (0,)), Piece("w", np.ones(2), (4,), (2,))]
    folder = edited(save(tmp_path, 1, pieces, {}), lambda body: body["arrays"]["w"]["pieces"][1].update(start=[0]))
    with pytest.raises(CheckpointError, match="the pieces overlap and leave 2 of 4 values open"):
        load(folder).read("w")


# ---- which one is used -----------------------------------------------------------------------------------------------

def spoil(folder: Path) -> None:
    raw = bytearray((folder / "part-00000.h5").read_bytes())
    raw[-1] ^= 1
    (folder / "part-00000.h5").write_bytes(raw)


@pytest.mark.promise("A10")
def test_the_newest_is_told_by_its_step_and_not_by_file_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 100, 20):
        os.utime(save_model(tmp_path, step), (0, 2_000_000_000 - step))
    (tmp_path / "step-00000300.tmp-0123abcd").mkdir()
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "step-00000400").symlink_to(tmp_path / "step-00000009")
    (tmp_path / "step-00000010").symlink_to(tmp_path / "step-00000009")
    assert latest(tmp_path).step == 100
    assert capsys.readouterr().err == ("warning: reading step-00000100: newer checkpoints cannot be used (step-00000400: it is a "
                                       "symbolic link, which no run makes; put the folder itself there)\n")
    assert [path.name for path in candidates(tmp_path)] == ["step-00000100", "step-00000020", "step-00000009"]


@pytest.mark.promise("B5")
def test_a_run_with_nothing_but_a_link_does_not_start_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    assert not continues(run, "auto")
    (run.checkpoints / "step-00000400").symlink_to(save_model(tmp_path, 400))
    assert continues(run, "auto")
    with pytest.raises(CheckpointError, match="none of the checkpoints is whole; tried step-00000400: it is a symbolic link"):
        latest(run.checkpoints)


@pytest.mark.promise("B5")
def test_a_damaged_newest_checkpoint_is_passed_over_with_one_warning_naming_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save_model(tmp_path, step)
    spoil(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert latest(tmp_path, purpose=RESUME).step == 1
    warning, = capsys.readouterr().err.splitlines()
    assert "step-00000003" in warning and "step-00000002" in warning
    assert warning.startswith("warning: resuming from step-00000001: newer checkpoints cannot be used (step-00000003: file=")


@pytest.mark.promise("B6")
def test_when_none_is_whole_all_that_were_tried_are_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        spoil(save_model(tmp_path, step))
    with pytest.raises(CheckpointError, match="none of the checkpoints is whole; tried step-00000002: .*; step-00000001: "):
        latest(tmp_path)


@pytest.mark.promise("B6")
def test_when_there_is_none_it_is_missing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MissingError, match="there is no checkpoint to resume from; start the run without --resume"):
            latest(folder, purpose=RESUME)


@pytest.mark.parametrize(("purpose", "doing", "missing"), [
    (READ, "reading step-00000001: newer", "there is no checkpoint in this folder"),
    (EVALUATE, "evaluating step-00000001: newer", "there is no checkpoint to evaluate"),
    (START, "model.init_from: starting from step-00000001: newer", "model.init_from names neither a run folder nor"),
])
def test_the_message_speaks_of_what_was_asked_for(tmp_path: Path, purpose: Purpose, doing: str, missing: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingError) as caught:
        latest(tmp_path, purpose=purpose)
    save_model(tmp_path, 1)
    spoil(save_model(tmp_path, 2))
    assert latest(tmp_path, purpose=purpose).step == 1
    said = capsys.readouterr().err
    spoil(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError) as damaged:
        latest(tmp_path, purpose=purpose)
    assert caught.value.message.startswith(missing) and said.startswith(f"warning: {doing}")
    assert not [text for text in (caught.value.message, damaged.value.message, said) if "resum" in text]


def test_all_ranks_use_what_rank_0_chose_and_share_its_error(tmp_path: Path) -> None:
    save_model(tmp_path, 1)
    results = on_ranks(3, lambda channel: latest(tmp_path, channel))
    assert all(isinstance(found, Checkpoint) and found.step == 1 for found in results)
    assert [type(error) for error in on_ranks(2, lambda channel: latest(tmp_path / "none", channel))] == [MissingError] * 2


# ---- which ones are deleted ------------------------------------------------------------------------------------------

def steps(folder: Path) -> list[int]:
    return sorted(folders.step_of(path) for path in candidates(folder))


@pytest.mark.promise("B13")
def test_pruning_keeps_the_last_few_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        newest = save_model(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 2, best=3, verified=newest)] == [f"step-0000000{i}" for i in (4, 2, 1)]
    assert steps(tmp_path) == [3, 5, 6]
    assert prune(tmp_path, 2, best=3) == []


@pytest.mark.promise("B13")
def test_pruning_never_deletes_the_last_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_model(tmp_path, step)
    spoil(tmp_path / "step-00000003")
    assert prune(tmp_path, 1) == [] and steps(tmp_path) == [1, 2, 3]
    prune(tmp_path, 2)
    assert steps(tmp_path) == [2, 3]


@pytest.mark.promise("B12")
def test_pruning_leaves_what_it_did_not_write(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_model(tmp_path, step)
    (tmp_path / "step-00000001" / "notes.txt").touch()
    (tmp_path / "step-00000002").rename(tmp_path / "elsewhere")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "elsewhere")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 4] and (tmp_path / "step-00000002").is_symlink()
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["manifest.json", "part-00000.h5"]
    assert sorted(os.listdir(tmp_path / "step-00000001")) == ["manifest.json", "notes.txt", "part-00000.h5"]
