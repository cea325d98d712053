"""The HDF5 writer: what it writes is ordinary HDF5, and the operating system's errors come out with their place."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpitrain.errors import AccessError, CheckpointError, MpitrainError, OutputError, StorageError
from mpitrain.files import disk
from mpitrain.files.disk import DTYPES, file_sha256, make_folder, reading, storage_error, write_file
from mpitrain.files.hdf5_file import write_hdf5


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {f"dtypes/{name}": (rng.random((3, 5)) * 2).astype(name) for name in sorted(DTYPES)}
    made |= {"parameters/blocks.0.weight": rng.standard_normal((70, 130)).astype(np.float32), "scalar": np.array(3.5),
             "buffers/empty": np.zeros((0, 4), np.float32), "a/b/c/deep[0:2,4:6]": np.asfortranarray(rng.random((2, 2)))}
    return made


def test_h5py_reads_every_dtype_and_shape_back(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "x.h5", arrays())
    with h5py.File(tmp_path / "x.h5", "r") as file:
        for name, array in arrays().items():
            stored = file[name]
            assert (stored.dtype, stored.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(stored[()], array)


def test_the_reported_offsets_and_hashes_are_those_of_the_bytes_in_the_file(tmp_path: Path) -> None:
    size, digest, places = write_hdf5(tmp_path / "x.h5", arrays())
    raw = (tmp_path / "x.h5").read_bytes()
    assert (size, digest) == (len(raw), hashlib.sha256(raw).hexdigest())
    for name, array in arrays().items():
        offset, sha256 = places[name]
        assert raw[offset:offset + array.nbytes] == array.tobytes()
        assert sha256 == hashlib.sha256(array.tobytes()).hexdigest()


def test_the_file_is_for_the_oldest_readers_and_has_no_chunks_or_times(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "x.h5", arrays())
    assert (tmp_path / "x.h5").read_bytes()[8] == 0                     # superblock version
    with h5py.File(tmp_path / "x.h5", "r") as file:
        dataset = file["parameters/blocks.0.weight"]
        assert dataset.chunks is None and dataset.compression is None
        assert h5py.h5o.get_info(dataset.id).mtime == 0


def test_the_same_arrays_give_the_same_file(tmp_path: Path) -> None:
    assert write_hdf5(tmp_path / "a.h5", arrays()) == write_hdf5(tmp_path / "b.h5", arrays())


def test_big_endian_values_are_written_little_endian(tmp_path: Path) -> None:
    *_, places = write_hdf5(tmp_path / "x.h5", {"x": np.arange(3, dtype=">f4")})
    start, _ = places["x"]
    assert (tmp_path / "x.h5").read_bytes()[start:start + 12] == np.arange(3, dtype="<f4").tobytes()


def test_so_many_names_that_libhdf5_reads_its_own_headers_back(tmp_path: Path) -> None:
    many = {f"parameters/blocks.{i // 40}.layer{i:05d}.weight": np.full(3, i, np.float32) for i in range(4000)}
    write_hdf5(tmp_path / "x.h5", many)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        assert all((file[name][()] == array).all() for name, array in many.items())


def test_the_raw_data_is_never_copied_as_a_whole(tmp_path: Path) -> None:
    import tracemalloc
    big = {"x": np.ones(8 << 20, np.uint8)}
    write_hdf5(tmp_path / "warm.h5", {"x": np.ones(8, np.uint8)})
    tracemalloc.start()
    write_hdf5(tmp_path / "x.h5", big)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data[:1000]), offset))
    write_hdf5(tmp_path / "x.h5", arrays())
    monkeypatch.undo()
    with h5py.File(tmp_path / "x.h5", "r") as file:
        assert all((file[name][()] == array).all() for name, array in arrays().items())


def test_a_write_that_writes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(StorageError, match="EIO"):
        write_file(tmp_path / "x", [b"abc"])


def test_a_disk_that_keeps_other_bytes_is_found_by_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def lying(fd: int, data: Any, offset: int) -> int:
        spoiled = bytearray(data)
        spoiled[-1] ^= 1
        return pwrite(fd, bytes(spoiled), offset)

    monkeypatch.setattr(os, "pwrite", lying)
    with pytest.raises(StorageError, match="read again after writing is not what was written: check the disk") as caught:
        write_hdf5(tmp_path / "x.h5", {"x": np.ones(4)})
    assert caught.value.offset == 0                                         # the first block that differs: libhdf5's headers


def test_a_file_that_someone_else_writes_to_is_found_by_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def longer(fd: int) -> None:
        os.ftruncate(fd, os.fstat(fd).st_size + 1)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", longer)
    with pytest.raises(StorageError, match="the file has [0-9]+ bytes after [0-9]+ were written: does another program write"):
        write_hdf5(tmp_path / "x.h5", {"x": np.ones(4)})


def test_a_file_system_that_cannot_reserve_space_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    _, digest, _ = write_hdf5(tmp_path / "x.h5", arrays())
    assert file_sha256(tmp_path / "x.h5") == digest


@pytest.mark.promise("F7")
def test_an_existing_file_is_not_overwritten_and_a_link_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(StorageError, match="making the file failed: File exists"):
            write_file(tmp_path / name, [b"x"])
    assert (tmp_path / "there").read_text() == "mine" and not (tmp_path / "elsewhere").exists()


@pytest.fixture
def small_file_limit() -> Iterator[int]:
    """Files of this process end at 64 KiB, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield 1 << 16
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.promise("B3")
def test_a_file_that_may_not_grow_is_refused_before_data_is_written(
        tmp_path: Path, small_file_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("wrote before the space was reserved"))
    with pytest.raises(StorageError, match=r"reserving space failed: File too large \(EFBIG\); it needs \d+ bytes, \d+ are free; "
                                           r"raise the limit on file sizes") as caught:
        write_hdf5(tmp_path / "x.h5", {"x": np.zeros(1 << 17)})
    assert caught.value.file == str(tmp_path / "x.h5") and caught.value.exit_code == 74


def test_without_reserved_space_the_failing_offset_is_named(
        tmp_path: Path, small_file_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "reserve", lambda fd, size: None)
    with pytest.raises(StorageError, match="writing failed: File too large") as caught:
        write_file(tmp_path / "x", [bytes(1000), bytes(1 << 17)])
    assert caught.value.offset == 1000


@pytest.mark.parametrize(("number", "kind", "words"), [
    (errno.ENOSPC, StorageError, "No space left on device.*free some space or set run.out"),
    (errno.EDQUOT, StorageError, "your quota is used up"),
    (errno.EIO, StorageError, "Input/output error"),
    (errno.EROFS, OutputError, "Read-only file system.*set run.out to a folder that can be written"),
    (errno.ELOOP, OutputError, "a symbolic link stands where a file of ours should"),
    (errno.ENAMETOOLONG, OutputError, "set run.out to a shorter name"),
    (errno.ENOTDIR, OutputError, "a file stands where a folder should"),
    (errno.EACCES, AccessError, "Permission denied.*change its permissions"),
    (errno.EPERM, AccessError, "Operation not permitted"),
])
@pytest.mark.promise("B2")
def test_each_errno_has_its_class_and_advice(number: int, kind: type[MpitrainError], words: str, tmp_path: Path) -> None:
    error = storage_error(OSError(number, "x"), "writing", tmp_path / "f", offset=5, needed=10)
    assert type(error) is kind
    with pytest.raises(kind, match=f"writing failed: .*{words}"):
        raise error
    assert errno.errorcode[number] in str(error) and "it needs 10 bytes, " in str(error) and "offset=5" in str(error)


@pytest.mark.promise("B3")
def test_used_up_inodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 10, 4096, 6, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    error = storage_error(OSError(errno.ENOSPC, "x"), "making the file", tmp_path / "f", needed=10)
    assert "it needs 10 bytes, 40960 are free, no inode (file) is free" in str(error)


def test_folders_are_made_with_their_parents_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", synced.append)
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path, tmp_path / "a"]


@pytest.mark.promise("F6")
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    for name, words in (("link", "found a symbolic link"), ("fifo", "expected a regular file"), ("none", "the file is missing")):
        with pytest.raises(CheckpointError, match=words), reading(tmp_path / name):
            pass
