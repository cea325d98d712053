"""The parts of shared memory that need no second rank: pages that cannot be had, and slices."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm.shared.window import FOLDER_SETTING, _number, _populate, folder, free_bytes, slice_between_lines


def test_pages_that_are_not_there_are_an_error_number_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    with open(tmp_path / "memory", "wb+") as file:
        file.truncate(4 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
        block = np.frombuffer(memory, np.uint8)
        assert _populate(block) == 0
        file.truncate(mmap.PAGESIZE)                          # touching the rest would raise SIGBUS
        if _populate(block) == 0:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert _populate(block) == errno.EFAULT


def test_the_folder_is_the_one_that_open_mpi_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_SETTING, str(tmp_path))
    assert folder() == str(tmp_path) and free_bytes() > 0
    monkeypatch.setenv(FOLDER_SETTING, str(tmp_path / "not there"))
    assert _number(free_bytes) == -errno.ENOENT


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_slices_cover_an_array_once_and_meet_between_cache_lines(n: int, itemsize: int) -> None:
    for count in (0, 1, 5, 100, 4097):
        for address in (4096, 4096 + 3 * itemsize):
            slices = [slice_between_lines(address, itemsize, count, n, rank) for rank in range(n)]
            assert [i for start, stop in slices for i in range(start, stop)] == list(range(count))
            assert all((address + stop * itemsize) % 64 == 0 for _, stop in slices if 0 < stop < count)
            assert count < 100 * n or max(b - a for a, b in slices) - min(b - a for a, b in slices) <= 2 * 64 // itemsize
