"""Rows of a CSV file, read some lines at a time: the file may be larger than memory.

Who describes the file goes over it once, and keeps where pieces of it begin and which rows they hold. A reader takes the piece
that a row is in, and makes numbers of the lines that are wanted.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.importers import decoded
from mpitrain.data.shards import Rows, Values
from mpitrain.data.storage import Bytes, File, reading
from mpitrain.errors import DataError

PIECE = 256 << 10                 # bytes, but for what a line needs more
MOST_LINE = 64 << 20              # a line of numbers is shorter
MOST_PIECES = 1 << 16             # of a larger file each is longer: all ranks keep the list
BOM = b"\xef\xbb\xbf"


def describe_csv(path: Path, x: str | None) -> tuple[str, dict[str, Any]]:
    """The name of what is read, and the description of a table of numbers, with a header line or without: as float32 (rows,
    columns). `x` names columns in their order, by the header or, without one, by their numbers from 0. A number may be nan or
    inf.

    DataError where the table is empty, lines have other numbers of columns, or the first piece has a cell that is no number;
    cells of others are read when their rows are.
    """
    pieces: list[tuple[int, int]] = []                     # (offset of its first line, number of its first row)
    names, columns, n_rows, every = list[str](), list[int](), 0, 1
    with reading(path, "the data file is not there", "no permission to read the data", "reading the data failed"), \
            open(path, "rb") as file:
        for number, (offset, data) in enumerate(_pieces(file.read, path)):
            spans = lines_of(data)
            if not names and len(spans):
                first = cells_of(data[spans[0, 0]:spans[0, 1]], path)
                header = not all(map(is_number, first))
                names = [cell.strip() for cell in first] if header else [str(i) for i in range(len(first))]
                columns = _columns(names, x, path)
                begin = int(spans[0, 1]) if header else 0
                offset, data = offset + begin, data[begin:]
                spans = lines_of(data)
                parsed(data, spans, columns, names, path, 0)
            _refuse_ragged(data, spans, len(names), path, n_rows)
            if number % every == 0:
                pieces.append((offset, n_rows))
            n_rows += len(spans)
            if len(pieces) > MOST_PIECES:
                pieces, every = pieces[::2], 2 * every
    if not names:
        raise DataError("the table is empty", file=path)
    return "x" if x is None else x, {"shape": [n_rows, len(columns)], "dtype": "<f4", "storage": "csv", "columns": columns,
                                     "names": names, "pieces": pieces}


def _pieces(read: Callable[[int], bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines) one after the other."""
    offset, kept = 0, b""
    while True:
        data = read(PIECE)
        if offset == 0 and not kept and data.startswith(BOM):
            offset, data = len(BOM), data[len(BOM):]
        whole, end, rest = (kept + data).rpartition(b"\n") if data else (kept, b"", b"")
        if whole or end:
            yield offset, whole + end
        offset, kept = offset + len(whole) + len(end), rest
        if not data:
            return
        if len(kept) > MOST_LINE:
            raise DataError(f"a line of more than {MOST_LINE >> 20} MiB is no row of numbers", file=path, offset=offset)


def lines_of(data: bytes) -> Any:
    """(lines, 2): where each line that is not blank begins and ends in `data`, without what ends it."""
    bytes_ = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(bytes_ == ord("\n"))
    if len(data) and not data.endswith(b"\n"):
        stops = np.append(stops, len(data))
    starts = np.concatenate(([0], stops[:-1] + 1)) if len(stops) else stops
    stops = stops - ((stops > starts) & (bytes_[stops - 1] == ord("\r")))
    return np.stack((starts, stops), axis=1)[stops > starts]


def cells_of(line: bytes, path: Path, **where: Any) -> list[str]:
    try:
        return next(csv.reader([decoded(line, path)]), [])
    except csv.Error as error:
        raise DataError(f"a line cannot be read as CSV: {error}; lines end in \\n or \\r\\n", file=path, **where) from None


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _columns(names: Sequence[str], x: str | None, path: Path) -> list[int]:
    if x is None:
        return [*range(len(names))]
    wanted = [name.strip() for name in x.split(",")]
    for name in wanted:
        if names.count(name) == 1:
            continue
        found = f'{names.count(name)} columns are called "{name}"; give each a name of its own' if name in names else \
            f'no column "{name}" (there: {", ".join(names[:20])}); name columns with --x, commas between'
        raise DataError(found, file=path, dataset=name)
    return [names.index(name) for name in wanted]


def _refuse_ragged(data: bytes, spans: Any, n: int, path: Path, first: int) -> None:
    if b'"' in data:
        counts = np.array([len(cells_of(data[a:b], path, row=first + i)) for i, (a, b) in enumerate(spans)])
    else:
        commas = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(","))
        counts = 1 + np.searchsorted(commas, spans[:, 1]) - np.searchsorted(commas, spans[:, 0])
    wrong = np.flatnonzero(counts != n)
    if wrong.size:
        raise DataError(f"{counts[wrong[0]]} columns, but the first line has {n}", file=path, row=first + int(wrong[0]))


def parsed(data: bytes, spans: Any, columns: Sequence[int], names: Sequence[str], path: Path, first: int) -> Values:
    """The numbers of lines, float32; `first` is the number of the first one's row."""
    lines = [data[a:b] for a, b in spans]
    values = np.empty((len(lines), len(columns)), np.float32)
    with np.errstate(over="ignore"):
        try:
            if lines:
                values[...] = np.loadtxt([decoded(line, path) for line in lines], np.float64, comments=None, delimiter=",",
                                         usecols=columns, ndmin=2, quotechar='"')
        except ValueError:                       # it says less of what is wrong, and where
            for row, line in enumerate(lines):
                values[row] = _numbers(cells_of(line, path, row=first + row), columns, names, path, first + row)
    return values


def _numbers(cells: Sequence[str], columns: Sequence[int], names: Sequence[str], path: Path, row: int) -> list[float]:
    if len(cells) != len(names):
        raise DataError(f"{len(cells)} columns, but the first line has {len(names)}", file=path, row=row)
    for column in columns:
        if not is_number(cells[column]):
            raise DataError(f'"{cells[column]}" in column "{names[column]}" is no number', file=path, row=row)
    return [float(cells[column]) for column in columns]


class CsvReader:
    """The rows of one file; it keeps the last piece that was read."""

    def __init__(self, file: File, description: dict[str, Any]):
        self.file, self.description = file, description
        pieces = np.array(description["pieces"], np.int64)
        self.offsets, self.rows = np.append(pieces[:, 0], file.size), np.append(pieces[:, 1], description["shape"][0])
        self._kept: tuple[int, bytes, Any] = -1, b"", None

    def gather(self, rows: Rows, out: Bytes) -> None:
        self.file.check()
        pieces = np.searchsorted(self.rows[:-1], rows, side="right") - 1
        for piece in np.unique(pieces):
            places = np.flatnonzero(pieces == piece)
            data, spans = self._piece(int(piece))
            d, first = self.description, int(rows[places[0]])
            wanted = spans[rows[places] - self.rows[piece]]
            out[places] = parsed(data, wanted, d["columns"], d["names"], self.file.path, first).view(np.uint8)

    def _piece(self, number: int) -> tuple[bytes, Any]:
        if self._kept[0] != number:
            begin, end = (int(offset) for offset in self.offsets[number:number + 2])
            data = self.file.read(begin, end - begin, self.description["name"])
            self._kept = number, data, lines_of(data)
        return self._kept[1:]

    def verify(self) -> int:
        return 0
