"""Rows of NPZ, NPY and CSV files, read some at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.data import Dataset, csv_file
from mpitrain.data.unlabelled import describe_rows
from mpitrain.errors import DataError, MpitrainError

X = np.random.default_rng(0).normal(size=(300, 3, 5)).astype(np.float32)


def written(path: Path) -> Path:
    if path.stem == "packed":
        np.savez_compressed(path, x=X, other=np.arange(3))
    elif path.suffix == ".npz":
        np.savez(path, x=X, other=np.arange(3))
    elif path.suffix == ".npy":
        np.save(path, np.asfortranarray(X) if path.stem == "turned" else X.astype(">f4") if path.stem == "big" else X)
    return path


@pytest.mark.parametrize("name, storage", [("a.npz", "contiguous"), ("packed.npz", "stream"), ("a.npy", "contiguous"),
                                           ("big.npy", "contiguous"), ("turned.npy", "table")])
def test_rows_of_numpys_files_are_read_where_they_lie(tmp_path: Path, name: str, storage: str) -> None:
    described = describe_rows(written(tmp_path / name))
    assert described["shards"][0]["x"]["storage"] == storage
    data = Dataset(described)
    for rows in (np.arange(7), np.arange(64, 128), np.array([299, 3, 64, 3]), np.arange(300)):
        assert np.array_equal(data.read_field(data.x, rows), X[rows])
    data.close()


def table(lines: list[str], ending: str = "\n") -> bytes:
    return ending.join(lines).encode()


def test_csv_is_read_in_pieces_with_the_numbers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "PIECE", 1000)
    monkeypatch.setattr(csv_file, "MOST_PIECES", 40)
    values = np.random.default_rng(1).normal(size=(3000, 4)) * 10.0 ** np.random.default_rng(2).integers(-45, 39, (3000, 4))
    values[5, 1], values[2999, 0], values[8, 2] = np.nan, -np.inf, 1e300
    cells = [[repr(float(value)) for value in row] for row in values]
    cells[7][0], cells[9][3] = f" {cells[7][0]} ", f'"{cells[9][3]}"'
    lines = [",".join(row) for row in cells]
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float32)
    for header, ending, blank in ((True, "\n", False), (False, "\r\n", True), (True, "\r\n", True)):
        body = ["", *lines[:1700], "", "", *lines[1700:], ""] if blank else lines
        path = tmp_path / "a.csv"
        path.write_bytes((b"\xef\xbb\xbf" if blank else b"") + table(["a,b, c,d"] * header + body, ending))
        described = describe_rows(path)
        entry = described["shards"][0]["x"]
        assert entry["shape"] == [3000, 4] and 20 <= len(entry["pieces"]) <= 40
        data = Dataset(described)
        for rows in (np.arange(3000), np.arange(64, 128), np.array([2999, 0, 1700, 1699])):
            assert np.array_equal(data.read_field(data.x, rows), wanted[rows], equal_nan=True)
        data.close()
    data = Dataset(describe_rows(path, "c,a"))
    assert np.array_equal(data.read_field(data.x, np.arange(3000)), wanted[:, [2, 0]], equal_nan=True)
    data.close()


def test_columns_of_one_name_are_each_read_and_none_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b,b\n1,2,3\n4,5,6\n")
    data = Dataset(describe_rows(path))
    assert data.read_field(data.x, np.arange(2)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert describe_rows(path, "a")["shards"][0]["x"]["columns"] == [0]
    with pytest.raises(DataError, match='2 columns are called "b"; give each a name'):
        describe_rows(path, "a,b")


def test_a_csv_that_is_no_table_of_numbers_is_refused_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "PIECE", 100)
    monkeypatch.setattr(csv_file, "MOST_LINE", 1000)
    path = tmp_path / "a.csv"

    def said(*lines: str, ending: str = "\n", rows: Any = None) -> str:
        path.write_bytes(table(list(lines), ending))
        with pytest.raises(MpitrainError) as caught:
            data = Dataset(describe_rows(path))
            data.read_field(data.x, np.arange(len(data)) if rows is None else rows)
        return str(caught.value)

    good = ["1,2"] * 200
    assert "the table is empty" in said("", "")
    assert "there are no rows: the shape is (0, 2)" in said("a,b")
    assert "3 columns, but the first line has 2" in (text := said(*good, "1,2,3", *good)) and "row=200" in text
    assert '3 columns, but the first line has 2' in (text := said(*good, '1,"2",3', *good)) and "row=200" in text
    assert '"x" in column "1" is no number' in (text := said(*good, "1,x", *good)) and "row=200" in text
    assert '"" in column "0" is no number' in said("1,2", ",2")
    assert "more than 0 MiB is no row" in said("1" * 5000)
    assert "lines end in" in said("1,2", "3,4", ending="\r")
    path.write_bytes(b"1,2\n3,\xff\n")
    with pytest.raises(DataError, match="0xff is not UTF-8"):
        describe_rows(path)


def test_a_damaged_or_cut_archive_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "packed.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + bytes(64) + whole[3064:])
    with pytest.raises(DataError, match="the array is damaged"):
        data = Dataset(describe_rows(path))
        data.read_field(data.x, np.arange(300))
    for name in ("a.npz", "a.npy"):
        path = written(tmp_path / name)
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(DataError, match="cannot be read as NPZ or NPY"):
            describe_rows(path)


def test_memory_is_that_of_a_piece_whatever_the_size_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"1.5,2.5,3.5,4.5\n" * (1 << 20))
    np.savez_compressed(tmp_path / "packed.npz", x=np.zeros((1 << 12, 1 << 10), np.float32))
    np.savez(tmp_path / "a.npz", x=np.zeros((1 << 12, 1 << 10), np.float32))
    for name, size in (("a.csv", 1 << 20), ("packed.npz", 1 << 12), ("a.npz", 1 << 12)):
        tracemalloc.start()
        data = Dataset(describe_rows(tmp_path / name))
        assert len(data) == size
        for first in range(0, size, size // 8):
            data.read_field(data.x, np.arange(first, first + 64))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        data.close()
        assert peak < 6 << 20, (name, peak)                      # of 16 MiB
