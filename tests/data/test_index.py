"""`data index` gives HDF5 files of somebody else checksums: a flipped bit is found before its values are used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_inputs import features

from mpitrain.data import Dataset, describe, found
from mpitrain.data.index import index
from mpitrain.data.report import verify
from mpitrain.errors import DataError, OutputError
from mpitrain.verbs import data as verb

pytestmark = pytest.mark.usefixtures("one_parser")

ALL = np.arange(60)
STORAGE = {"contiguous": {}, "chunks": {"chunks": (7, 3, 2)},
           "gzip": {"chunks": (16, 4, 3), "compression": "gzip", "shuffle": True}, "inline": "compact"}


def folder(tmp_path: Path, options: Any) -> Path:
    """Two files of 30 rows, with names of datasets that only their owner knows."""
    there = tmp_path / "theirs"
    there.mkdir()
    for part in range(2):
        with h5py.File(there / f"part{part}.h5", "w") as file:
            x, y = features(30, 4, 3, dtype="<f4") + part, np.arange(30) % 5
            if options == "compact":
                made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                made.set_layout(h5py.h5d.COMPACT)
                space = h5py.h5s.create_simple(x.shape)
                h5py.h5d.create(file.id, b"fields", h5py.h5t.IEEE_F32LE, space, made).write(h5py.h5s.ALL, h5py.h5s.ALL, x)
            else:
                file.create_dataset("fields", data=x, **options)
            file["labels"] = y
    return there


def read(path: Path) -> tuple[Any, Any]:
    dataset = Dataset(describe(path, x="/fields", y="/labels"))
    try:
        return dataset.read(ALL)
    finally:
        dataset.close()


def places(path: Path) -> list[int]:
    """Bytes of the file that hold values of its inputs."""
    found = describe(path, x="/fields", y="/labels")["shards"][0]["x"]
    if found["storage"] == "chunked":
        return [offset + size // 2 for offset, size in zip(found["offsets"], found["sizes"])]
    values = path.read_bytes()
    start = found["offset"] if "offset" in found else values.index(features(30, 4, 3, dtype="<f4").tobytes())
    return [start, start + 700, start + 1439]


@pytest.mark.parametrize("options", STORAGE.values(), ids=list(STORAGE))
@pytest.mark.promise("C2")
def test_a_bit_that_flips_after_the_manifest_was_made_is_found(tmp_path: Path, options: Any) -> None:
    there = folder(tmp_path, options)
    before = read(there)
    assert index(there, x="/fields", y="/labels")[0] == 60 and verify(there)[1] >= 4
    x, y = read(there)
    assert np.array_equal(x, before[0]) and np.array_equal(y, before[1])
    first = there / "part0.h5"
    whole = first.read_bytes()
    found = places(first)
    for place in (found[0], found[len(found) // 2], found[-1]):
        first.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:])
        with pytest.raises(DataError, match=r"sha256 \w+\.\. is not \w+\.\. of the manifest; the file is damaged") as error:
            read(there)
        assert error.value.code == "E_DATA_CHECKSUM" and "part0.h5" in str(error.value)
    first.write_bytes(whole)
    assert np.array_equal(read(there)[0], before[0])


def test_without_a_manifest_the_same_flip_is_not_seen(tmp_path: Path) -> None:
    """The control: nothing but the checksum tells it."""
    there = folder(tmp_path, {})
    first, before = there / "part0.h5", read(there)
    whole, place = first.read_bytes(), places(first)[1]
    first.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:])
    assert not np.array_equal(read(there)[0], before[0])


def test_the_manifest_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    there = folder(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr("mpitrain.data.index.sync_folder", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr("pathlib.Path.rename", lambda *arguments: None)
        with pytest.raises(KeyboardInterrupt):
            index(there, x="/fields", y="/labels")
    assert sorted(file.name for file in there.iterdir()) == ["part0.h5", "part1.h5"]
    from argparse import ArgumentParser

    from mpitrain.comm.job.guard import Process
    parser = ArgumentParser()
    verb.add_arguments(parser)
    assert verb.run(parser.parse_args(["index", str(there), "--x", "/fields", "--y", "/labels"]), Process()) == 0
    assert capsys.readouterr().out == f"{there}: 60 rows, 4 checksums in {there / 'manifest.json'}\n"
    assert json.loads((there / "manifest.json").read_text())["kind"] == "classification"
    with pytest.raises(OutputError, match="there is a manifest.json"):
        index(there)
    with pytest.raises(OutputError, match="is a file, and a manifest belongs to a folder"):
        index(there / "part0.h5")


@pytest.mark.promise("C5")
@pytest.mark.parametrize("name", ["part2.h5", "PART.HDF5", "part2", "part2.h5.bak"])
def test_a_file_that_is_not_in_the_manifest_is_refused_instead_of_left_out(tmp_path: Path, name: str) -> None:
    there = folder(tmp_path, {})
    index(there, x="/fields", y="/labels")
    for beside in ("README.md", ".hidden.h5", "notes.json"):
        (there / beside).write_bytes(b"")
    (there / "part9.h5").mkdir()
    assert len(describe(there)["shards"]) == 2
    shutil.copy(there / "part0.h5", there / name)
    for look in (describe, verify):
        with pytest.raises(DataError, match=f"the folder also holds {name}, of which manifest.json says nothing, .*move it away"):
            look(there)
    assert len(describe(there, apart=there / name)["shards"]) == 2           # data.validation may name it
    for file in ("manifest.json", ".hidden.h5"):
        (there / file).unlink()
    if name in ("part2.h5", "PART.HDF5"):
        assert index(there, x="/fields", y="/labels")[0] == 90
    else:
        with pytest.raises(DataError, match=f"holds {name}, HDF5 by its content, but not by its name"):
            index(there, x="/fields", y="/labels")


def test_of_many_such_files_three_are_named(tmp_path: Path) -> None:
    there = folder(tmp_path, {})
    index(there, x="/fields", y="/labels")
    for number in range(5):
        (there / f"late{number}.h5").touch()
    with pytest.raises(DataError, match="also holds late0.h5, late1.h5, late2.h5 and 2 more, of which"):
        describe(there)


def test_a_folder_of_a_million_other_files_is_not_opened_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = folder(tmp_path, {})
    for number in range(7):
        (there / f"{number}.jpg").touch()
    opened: list[str] = []
    monkeypatch.setattr(found, "LOOKED_INTO", 4)
    monkeypatch.setattr(found, "_is_hdf5", lambda entry: opened.append(entry.name))
    assert len(found.find_files(there)[0]) == 2 and opened == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]
