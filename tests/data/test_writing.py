"""Shards and their manifest: complete or not there, checked when read, never replacing what is not ours."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_inputs import features, in_chunks

from mpitrain.data import Dataset, describe, write_parts, write_shards
from mpitrain.data.report import info, verify
from mpitrain.errors import AccessError, DataError, MissingError, OutputError, StorageError

pytestmark = pytest.mark.usefixtures("one_parser")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "out", features(25, 3), np.arange(25) % 4, kind="classification", shard_rows=10,
                        classes=["a", "b", "c", "d"])


def edit(folder: Path, **changes: Any) -> None:
    """On purpose, so that it does not carry its own hash any more."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256", None)
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.promise("C2", "F5")
def test_a_manifest_that_was_changed_by_accident_is_refused(shards: Path) -> None:
    text = (shards / "manifest.json").read_text()
    assert describe(shards)["classes"] == ["a", "b", "c", "d"], "the control"
    for changed in (text.replace("1048576", "NaN"), text.replace("1048576", "1e999"), text.replace('"classes"', '"clasres"'),
                    text.replace('"b"', '"c"')):
        (shards / "manifest.json").write_text(changed)
        with pytest.raises(DataError, match='its own sha256 does not match; .*, take out the line "sha256"'):
            describe(shards)
    edit(shards, classes=["a", "c", "c", "d"])
    assert describe(shards)["classes"] == ["a", "c", "c", "d"]


@pytest.mark.promise("F5")
def test_a_manifest_whose_values_would_fill_the_memory_is_not_parsed(shards: Path) -> None:
    edit(shards, more=[[]] * 700_000)
    with pytest.raises(DataError, match=r"1,400,\d+ commas and brackets in 2,801,\d+ bytes; at most 1,165,\d+ are read"):
        describe(shards)
    edit(shards, more=[[]] * 500_000)
    assert describe(shards)["kind"] == "classification"


def test_h5py_reads_what_we_wrote_and_the_manifest_hashes_the_raw_bytes(shards: Path) -> None:
    x, y = features(25, 3), np.arange(25) % 4
    manifest = json.loads((shards / "manifest.json").read_text())
    assert [s["file"] for s in manifest["shards"]] == ["shard-00000.h5", "shard-00001.h5", "shard-00002.h5"]
    for i, shard in enumerate(manifest["shards"]):
        part = slice(10 * i, 10 * i + 10)
        with h5py.File(shards / shard["file"]) as file:
            assert np.array_equal(file["x"][:], x[part]) and np.array_equal(file["y"][:], y[part])
            assert file["x"].chunks is None and file["x"].compression is None
        assert shard["x"]["sha256"] == [hashlib.sha256(x[part].tobytes()).hexdigest()]
    assert not [f for f in shards.parent.iterdir() if f != shards]            # no temporary folder is left


def test_large_datasets_have_a_checksum_for_each_mebibyte(tmp_path: Path) -> None:
    x = features(3000, 256)
    folder = write_shards(tmp_path / "out", x, np.arange(3000), kind="classification")
    sums = json.loads((folder / "manifest.json").read_text())["shards"][0]["x"]["sha256"]
    raw = x.tobytes()
    assert sums == [hashlib.sha256(raw[i:i + 2**20]).hexdigest() for i in range(0, len(raw), 2**20)]
    assert len(sums) == 3 and verify(folder) == (3000, 4)


@pytest.mark.parametrize("stored", [Path, in_chunks])
def test_written_rows_come_back_and_verify(tmp_path: Path, stored: Callable[[Path], Path]) -> None:
    for dtype in ("f8", ">i4", "?"):
        x = features(700, 4, 5, dtype=dtype)
        folder = stored(write_shards(tmp_path / dtype, x, np.arange(700), kind="classification"))
        assert np.array_equal(Dataset(describe(folder)).read(np.arange(700))[0], x)
        assert verify(folder)[0] == 700


def test_an_existing_folder_is_kept_unless_it_is_empty_or_ours_to_overwrite(shards: Path, tmp_path: Path) -> None:
    before = (shards / "manifest.json").read_bytes()
    again = {"x": features(5, 2), "y": np.arange(5), "kind": "classification"}
    with pytest.raises(OutputError, match="exists; choose another --out, or --overwrite"):
        write_shards(shards, **again)
    (shards / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not our shards \(notes.txt\)"):
        write_shards(shards, **again, overwrite=True)
    assert (shards / "manifest.json").read_bytes() == before
    (shards / "notes.txt").unlink()
    assert len(Dataset(describe(write_shards(shards, **again, overwrite=True)))) == 5
    assert sorted(f.name for f in shards.iterdir()) == ["manifest.json", "shard-00000.h5"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    write_shards(tmp_path / "empty", **again)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="not a folder"):
        write_shards(tmp_path / "file", **again, overwrite=True)
    with pytest.raises(OutputError, match="file.: the output is not a folder; choose another --out") as found:
        write_shards(tmp_path / "file/train", **again)
    assert found.value.exit_code == 73


def test_parts_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    part = features(5, 2), np.arange(5)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").write_text("mine")
    for parts, error, said in (({"a": part, "b": part}, OutputError, "exists"),
                               ({"a": part, "c": (part[0], part[1][:4])}, DataError, "5 rows of x but 4 of y")):
        with pytest.raises(error, match=said):
            write_parts(tmp_path, parts, kind="classification")
        assert [folder.name for folder in tmp_path.iterdir()] == ["b"]
    write_parts(tmp_path, {"a": part, "c": part}, kind="classification", classes=list("abcde"))
    assert describe(tmp_path / "a")["classes"] == describe(tmp_path / "c")["classes"] == list("abcde")


def test_a_write_that_fails_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call, number, expected in (("posix_fallocate", errno.ENOSPC, StorageError), ("pwrite", errno.EIO, StorageError),
                                   ("fsync", errno.EDQUOT, StorageError), ("mkdir", errno.EACCES, AccessError)):
        def fail(*_: object, number: int = number, **__: object) -> None:
            raise OSError(number, os.strerror(number))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(expected, match=os.strerror(number)):
                write_shards(tmp_path / "out", features(9, 2), np.arange(9), kind="classification")
        assert not list(tmp_path.iterdir()), call


@pytest.mark.promise("B3")
def test_a_real_size_limit_of_the_system_is_a_clean_error(tmp_path: Path) -> None:
    script = ("import resource, signal, sys\nimport numpy as np\nfrom mpitrain.data import write_shards\n"
              "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
              "write_shards(sys.argv[1], np.zeros((1000, 100)), np.arange(1000), kind='classification')")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "StorageError" in done.stderr and "File too large" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("x", "y", "message"), [
    (np.zeros((0, 3)), None, "no rows"), (np.zeros(3), np.zeros(4), "3 rows of x but 4 of y"),
    (np.zeros(3, "c16"), None, "x has dtype complex128"), (np.zeros(3), np.array(["a", "b", "c"]), "y has dtype <U1")])
def test_values_that_cannot_be_stored_are_refused(tmp_path: Path, x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_shards(tmp_path / "out", x, y, kind="regression")


@pytest.mark.parametrize(("changes", "message"), [
    ({"version": 2}, "schema version 2; this mpitrain reads version 1"), ({"format": "zip"}, "not a manifest"),
    ({"kind": "magic"}, "kind is 'magic'"), ({"kind": "regression"}, 'kind is "regression", but the shapes'),
    ({"block": 0}, "block is 0"), ({"classes": [1]}, "classes must be a list of strings"),
    ({"shards": []}, "at least one entry"), ({"shards": [{"file": "shard-00000.h5"}]}, "a shard needs file, size, x"),
    ({"x": 3}, '"x" must name')])
def test_a_manifest_of_another_schema_is_refused(shards: Path, changes: dict[str, Any], message: str) -> None:
    edit(shards, **changes)
    with pytest.raises(DataError, match=message) as caught:
        describe(shards)
    assert caught.value.file == str(shards / "manifest.json")


@pytest.mark.parametrize("name", ["../shard-00000.h5", "/etc/passwd", "a/b.h5", "..", "", "a\0b", "a\nb"])
@pytest.mark.promise("F6")
def test_a_manifest_cannot_point_outside_its_folder(shards: Path, name: str) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["shards"][1]["file"] = name
    edit(shards, shards=manifest["shards"])
    with pytest.raises(DataError, match="must be a plain file name"):
        describe(shards)


@pytest.mark.promise("F6")
def test_a_shard_that_is_a_symbolic_link_is_refused(shards: Path) -> None:
    (shards / "shard-00001.h5").rename(shards.parent / "elsewhere.h5")
    (shards / "shard-00001.h5").symlink_to(shards.parent / "elsewhere.h5")
    with pytest.raises(DataError, match='"shard-00001.h5" is a symbolic link'):
        describe(shards)


@pytest.mark.promise("C1", "C2")
def test_a_missing_a_truncated_and_a_swapped_shard_are_named(shards: Path) -> None:
    second = shards / "shard-00001.h5"
    content = second.read_bytes()
    second.write_bytes(content[:-50])
    with pytest.raises(DataError) as caught:
        describe(shards)
    assert caught.value.file == str(second)
    second.unlink()
    with pytest.raises(MissingError, match='"shard-00001.h5" of the manifest is not there'):
        describe(shards)
    write_shards(shards.parent / "other", features(10, 4), np.arange(10), kind="classification")
    second.write_bytes((shards.parent / "other" / "shard-00000.h5").read_bytes())
    with pytest.raises(DataError, match="rows of float32 4, but the first shard|bytes, but the manifest says"):
        describe(shards)


@pytest.mark.promise("C5")
def test_a_shard_with_other_shapes_or_too_few_sums_than_promised_is_refused(shards: Path) -> None:
    for field, wrong, message in (("shape", [10, 4], r"shape \[10, 3\], but the manifest says \[10, 4\]"),
                                  ("dtype", "<f8", "dtype <f4, but the manifest says <f8"),
                                  ("sha256", [], "holds 0 checksums for 1 blocks")):
        manifest = json.loads((shards / "manifest.json").read_text())
        good = manifest["shards"][0]["x"][field]
        manifest["shards"][0]["x"][field] = wrong
        edit(shards, shards=manifest["shards"])
        with pytest.raises(DataError, match=message):
            describe(shards)
        manifest["shards"][0]["x"][field] = good
        edit(shards, shards=manifest["shards"])
    assert len(Dataset(describe(shards))) == 25


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff\xfe"])
def test_a_manifest_that_is_no_manifest_is_refused(shards: Path, content: bytes) -> None:
    (shards / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match="manifest"):
        describe(shards)


def test_info_says_what_is_there(shards: Path, tmp_path: Path) -> None:
    lines = info(shards)
    assert lines[0] == f"{shards}: classification, 25 rows in 3 files"
    assert '  x: "/x" float32 rows of 3, contiguous' in lines and "  classes: 4 (a b c d)" in lines
    assert "  checksums: 6 blocks" in lines and any("shard-00002.h5: 5 rows" in line for line in lines)
    packed = in_chunks(write_shards(tmp_path / "packed", np.zeros((100, 8), "f4"), np.zeros(100), kind="regression"))
    assert any("chunks of 100 rows, shuffle gzip" in line for line in info(packed))


def test_the_built_in_digits_are_the_uci_digits() -> None:
    dataset = Dataset(describe("digits"))
    x, y = dataset.read(np.arange(1797))
    assert x.shape == (1797, 1, 8, 8) and x.dtype == np.uint8 and x.max() == 16
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert x[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0] and y[:12].tolist() == [*range(10), 0, 1]
    assert verify("digits") == (1797, 2)


@pytest.mark.promise("F5")
def test_damaged_entries_of_a_manifest_are_refused(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    for change, message in (({"y": None}, '"y" of shard "shard-00000.h5" and of the whole set disagree'),
                            ({"x": {"sha256": "no"}}, 'has no list of SHA-256 sums'), ({"size": 3}, "the manifest says 3")):
        edit(shards, shards=[manifest["shards"][0] | change, *manifest["shards"][1:]])
        with pytest.raises(DataError, match=message):
            describe(shards)
    edit(shards, shards=manifest["shards"], y=5)
    with pytest.raises(DataError, match='"y" must name a dataset or be null'):
        describe(shards)
    from mpitrain.data import manifest as module
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(DataError, match="at most 10 are read"):
        describe(shards)


def test_the_description_of_a_dataset_outside_the_manifest_takes_no_checksums_from_it(shards: Path) -> None:
    found = describe(shards, x="y")
    assert found["kind"] == "tokens" and found["classes"] is None and "sha256" not in found["shards"][0]["x"]
