"""Values read from the bytes of a file equal what libhdf5 reads, and damage is found before use."""

from __future__ import annotations

import errno
import fcntl
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
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import Dataset, describe, write_shards
from mpitrain.data.filters import fletcher32
from mpitrain.data.report import verify
from mpitrain.errors import AccessError, DataError, MissingError, StorageError

pytestmark = pytest.mark.usefixtures("one_parser")

Write = Callable[..., Path]
ROWS = np.array([5, 0, 99, 42, 42, 17])

STORAGE = {
    "contiguous": {}, "chunks of whole rows": {"chunks": (7, 6, 5)}, "chunks that split rows": {"chunks": (7, 4, 2)},
    "one chunk": {"chunks": (100, 6, 5)}, "gzip": {"chunks": (16, 6, 5), "compression": "gzip"},
    "gzip and shuffle": {"chunks": (16, 6, 3), "compression": 9, "shuffle": True},
    "shuffle": {"chunks": (9, 6, 5), "shuffle": True},
    "all three": {"chunks": (10, 5, 5), "compression": 4, "shuffle": True, "fletcher32": True},
    "resizable": {"chunks": (8, 6, 5), "maxshape": (None, 6, 5)}}


ORDERS = ["<f4", ">f8", "<f2", "|u1", ">i2", "<i8"]
ALL_ORDERS = ("contiguous", "chunks that split rows", "all three")       # all ways of bytes; a process parses each file


@pytest.mark.parametrize(("storage", "dtype"), [(storage, dtype) for storage in STORAGE
                                                for dtype in (ORDERS if storage in ALL_ORDERS else ORDERS[:2])])
def test_every_storage_and_byte_order_gives_what_libhdf5_gives(plain_file: Write, storage: str, dtype: str) -> None:
    x, options = features(100, 6, 5, dtype=dtype), STORAGE[storage]
    y = np.arange(100) % 7
    path = plain_file(x=(x, options), y=(y, {"chunks": (30,)} if options else {}))
    dataset = Dataset(describe(path))
    got_x, got_y = dataset.read(ROWS)
    with h5py.File(path) as file:
        assert np.array_equal(got_x, file["x"][:][ROWS]) and np.array_equal(got_y, file["y"][:][ROWS])
    assert got_x.dtype == np.dtype(dtype).newbyteorder("=") and got_x.dtype.isnative
    assert np.array_equal(dataset.read(np.arange(100))[0], x)
    dataset.close()


def test_a_chunk_stored_without_its_filter_is_read_as_it_is(plain_file: Write) -> None:
    x = features(8, 4)
    path = plain_file(x=(x, {"compression": "gzip", "chunks": (4, 4)}), y=np.arange(8))
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((4, 0), x[4:].tobytes(), filter_mask=1)
    assert np.array_equal(Dataset(describe(path)).read(np.arange(8))[0], x)


def test_a_file_with_a_user_block_reads_the_same(plain_file: Write) -> None:
    x, y = features(50, 3), np.arange(50)
    for options in ({}, {"chunks": (8, 3), "compression": 1}):
        path = plain_file(userblock_size=512, x=(x, options), y=y)
        assert np.array_equal(Dataset(describe(path)).read(np.arange(50))[0], x)


def test_a_compact_dataset_is_read_from_its_description(tmp_path: Path) -> None:
    x = features(6, 2)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        compact = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(x.shape), plist)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, x)
        file["y"] = np.arange(6.0)
    assert np.array_equal(Dataset(describe(tmp_path / "c.h5")).read(np.array([4, 1]))[0], x[[4, 1]])


@given(st.binary(min_size=1, max_size=300))
def test_our_fletcher32_is_the_textbook_sum(data: bytes) -> None:
    first = second = 0
    for i in range(0, len(data), 2):
        first += int.from_bytes(data[i:i + 2].ljust(2, b"\0"), "big")
        second += first
    fold = [(s - 1) % 65535 + 1 if s else 0 for s in (second, first)]
    assert fletcher32(data) == fold[0] << 16 | fold[1]


def test_the_chunk_cache_gives_the_same_when_it_overflows(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitrain.data import storage
    x = features(1000, 8)
    dataset = Dataset(describe(plain_file(x=(x, {"chunks": (10, 8)}), y=np.arange(1000))))
    monkeypatch.setattr(storage, "CACHE_BYTES", 3 * 10 * 8 * 4)
    rows = np.random.default_rng(1).permutation(1000)
    for part in np.split(rows, 20):
        assert np.array_equal(dataset.read(part)[0], x[part])
    reader = dataset._readers["x"][0]
    assert len(reader.bands) <= 3                     # type: ignore[union-attr]


def test_rows_of_many_shards_come_in_the_order_given(tmp_path: Path) -> None:
    x, y = features(103, 4), features(103, 2, seed=1, dtype="f8")
    for stored in (Path, in_chunks):
        folder = stored(write_shards(tmp_path / stored.__name__, x, y, kind="regression", shard_rows=10))
        dataset = Dataset(describe(folder))
        rows = np.random.default_rng(0).permutation(103)
        assert len(dataset) == 103 and len(dataset.shards) == 11
        for want, got in zip((x, y), dataset.read(rows)):
            assert np.array_equal(want[rows], got)
        assert dataset.where(57) == (str(folder / "shard-00005.h5"), 7)


def flip(path: Path, offset: int) -> None:
    """Change one bit, and keep size and time stamp as bit rot does."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.promise("C2")
def test_a_flipped_bit_is_found_in_its_block_when_that_is_first_read(tmp_path: Path) -> None:
    x = features(6000, 256)                          # 6 MiB in rows of 1 KiB
    folder = write_shards(tmp_path / "out", x, np.arange(6000), kind="classification")
    description = describe(folder)
    offset = description["shards"][0]["x"]["offset"]
    flip(folder / "shard-00000.h5", offset + (5 << 20) + 77)
    dataset = Dataset(description)
    rows = np.arange(5119)                           # five whole blocks
    assert np.array_equal(dataset.read(rows)[0], x[:5119])
    with pytest.raises(DataError, match=r'chunk 5 of "/x": sha256 \w{8}\.\. is not \w{8}\.\. of the manifest') as caught:
        dataset.read(np.array([3, 5500]))
    error = caught.value
    assert error.code == "E_DATA_CHECKSUM" and error.offset == offset + (5 << 20) and error.dataset == "/x"
    assert error.file == str(folder / "shard-00000.h5") and error.exit_code == 65
    with pytest.raises(DataError, match="chunk 5"):
        verify(folder)


@pytest.mark.parametrize("stored", [Path, in_chunks])
@pytest.mark.promise("C2")
def test_no_flipped_bit_of_a_dataset_gets_through(tmp_path: Path, stored: Callable[[Path], Path]) -> None:
    x, y = features(400, 5, dtype="i2"), np.arange(400)
    folder = stored(write_shards(tmp_path / "out", x, y, kind="classification"))
    description = describe(folder)
    shard = description["shards"][0]
    for label in ("x", "y"):
        place = shard[label].get("offset") or shard[label]["offsets"][0]
        flip(folder / "shard-00000.h5", place + 30)
        with pytest.raises(DataError, match=f'chunk 0 of "/{label}"'):
            Dataset(description).read(np.arange(400))
        flip(folder / "shard-00000.h5", place + 30)
    assert np.array_equal(Dataset(description).read(np.arange(400))[0], x)


@pytest.mark.parametrize(("options", "message"), [
    ({"compression": "gzip"}, "chunk 0 of .*damaged"), ({"fletcher32": True}, "fletcher32 .* is not .* of the file")])
@pytest.mark.promise("C2")
def test_damage_in_a_file_without_manifest_is_found_where_its_filters_can_tell(
        plain_file: Write, options: dict[str, Any], message: str) -> None:
    path = plain_file(x=(features(64, 64), options | {"chunks": (64, 64)}), y=np.arange(64))
    description = describe(path)
    chunk = description["shards"][0]["x"]
    flip(path, chunk["offsets"][0] + chunk["sizes"][0] // 2)
    with pytest.raises(DataError, match=message) as caught:
        Dataset(describe(path)).read(np.array([1]))
    assert caught.value.offset == chunk["offsets"][0]


@pytest.mark.promise("A7", "C2")
def test_a_file_of_other_bytes_than_were_examined_is_refused_though_its_size_and_time_are_the_same(plain_file: Write) -> None:
    """As a host's own copy may be."""
    path = plain_file(x=features(64, 4), y=np.arange(64))
    description, times = describe(path), path.stat()
    Dataset(description).open()
    flip(path, description["shards"][0]["x"]["offset"] + 30)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match="holds other bytes here than where it was examined") as caught:
        Dataset(description).open()
    assert caught.value.code == "E_DATA_CHANGED"


@pytest.mark.promise("C7")
def test_a_chunk_that_unpacks_to_more_than_it_may_is_not_unpacked(plain_file: Write) -> None:
    import zlib
    path = plain_file(x=(np.zeros((8, 4), "f4"), {"compression": "gzip", "chunks": (8, 4)}), y=np.arange(8))
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((0, 0), zlib.compress(bytes(50 << 20)))
    with pytest.raises(DataError, match="bytes where the chunk needs 128"):
        Dataset(describe(path)).read(np.array([1]))


@pytest.mark.promise("C4")
def test_a_file_changed_after_it_was_examined_is_refused(plain_file: Write) -> None:
    path = plain_file(x=features(10, 3), y=np.arange(10))
    description = describe(path)
    plain_file(x=features(20, 3), y=np.arange(20))
    with pytest.raises(DataError, match="changed since it was examined") as caught:
        Dataset(description).open()
    assert caught.value.code == "E_DATA_CHANGED"
    path.unlink()
    with pytest.raises(MissingError, match="is gone"):
        Dataset(description).open()


DAMAGE = {"truncate": "os.truncate(path, 3000)", "delete": "os.unlink(path)",
          "replace": "shutil.copy(path, path + '2'); os.replace(path + '2', path)",
          "write": "f = open(path, 'r+b'); f.seek(2500); f.write(b'xx'); f.close(); os.utime(path, ns=(5, 5))"}
CHANGE = """
import os, shutil, sys
import numpy as np
from mpitrain.data import Dataset, describe
from mpitrain.errors import DataError
path = sys.argv[1]
dataset = Dataset(describe(path))
dataset.read(np.arange(10))
exec(sys.argv[2])
try:
    dataset.read(np.arange(9000, 9999))
except DataError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize(("change", "said"), [("truncate", "shrank from"), ("delete", "deleted or replaced"),
                                              ("replace", "deleted or replaced"), ("write", "was written to")])
@pytest.mark.parametrize("chunks", [None, (100, 16)], ids=["mapped", "chunked"])
@pytest.mark.promise("C4")
def test_a_file_that_changes_while_it_is_read_is_an_error_not_a_crash(
        plain_file: Write, change: str, said: str, chunks: tuple[int, int] | None) -> None:
    path = plain_file(x=(features(10_000, 16), {"chunks": chunks}), y=np.arange(10_000))
    done = subprocess.run([sys.executable, "-c", CHANGE, str(path), DAMAGE[change]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("E_DATA_CHANGED") and said in done.stdout and str(path) in done.stdout


def test_rows_beyond_the_end_are_refused(plain_file: Write) -> None:
    dataset = Dataset(describe(plain_file(x=features(10, 3), y=np.arange(10))))
    for row in (-1, 10):
        with pytest.raises(DataError, match=f"row {row} of a dataset of 10 rows"):
            dataset.read(np.array([0, row]))
    assert dataset.read(np.array([], np.int64))[0].shape == (0, 3)


def test_more_files_than_may_be_open_is_refused_with_the_limit(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "out", features(30, 2), np.arange(30), kind="classification", shard_rows=1)
    script = ("import resource, sys\nfrom mpitrain.data import Dataset, describe\n"
              "description = describe(sys.argv[1])\n"
              "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))\n"
              "Dataset(description).open()")
    run = [sys.executable, "-c", script, str(folder)]
    failed = subprocess.run([*run, "50", "80"], capture_output=True, text=True, timeout=60)
    assert "94 files must be open at once, but the limit is 80" in failed.stderr
    assert subprocess.run([*run, "20", "200"], capture_output=True, timeout=60).returncode == 0     # raised as far as needed


def test_what_the_operating_system_refuses_while_reading_is_named(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain_file(x=(features(64, 4), {"chunks": (8, 4)}), y=np.arange(64))
    description = describe(path)
    offset = description["shards"][0]["x"]["offsets"][0]
    for number, error in ((errno.EACCES, AccessError), (errno.EMFILE, StorageError)):
        with monkeypatch.context() as patch:
            def refuse(*_: object, number: int = number) -> int:
                raise OSError(number, os.strerror(number))
            patch.setattr(os, "open", refuse)
            with pytest.raises(error, match="no permission to read|Too many open files"):
                Dataset(description).open()
    dataset = Dataset(description)
    dataset.open()
    with monkeypatch.context() as patch:
        def fail(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")
        patch.setattr(os, "pread", fail)
        with pytest.raises(StorageError, match="reading failed: Input/output error") as caught:
            dataset.read(np.array([1]))
        assert (caught.value.offset, caught.value.dataset, caught.value.file) == (offset, "/x", str(path))
        patch.setattr(os, "pread", lambda *_: b"")
        with pytest.raises(DataError, match="ends 128 bytes too early"):
            dataset.read(np.array([1]))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))     # short reads go on
    assert np.array_equal(dataset.read(np.arange(64))[0], features(64, 4))


def test_another_host_may_hold_a_copy_with_its_own_time_stamp(plain_file: Write) -> None:
    path = plain_file(x=features(10, 3), y=np.arange(10))
    description = describe(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="changed since"):
        Dataset(description).open()
    assert len(Dataset(description | {"host": "another"}).read(np.arange(10))[0]) == 10


@pytest.mark.promise("C11")
def test_a_file_that_another_program_has_locked_is_read(plain_file: Write) -> None:
    path = plain_file(x=features(9, 2), y=np.arange(9))
    with open(path, "rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dataset = Dataset(describe(path))
        dataset.open()
        assert dataset.verify() is not None
