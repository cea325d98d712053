"""Tables in the files of other packages: CSV, R's .rda and .rdb, and the .ts of the UCR archive.

What is damaged, or has not the columns that are asked for, raises DataError with the column; the line ends with what to install.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.packages import Packaged, python_package
from mpitrain.errors import text_of

RDATA = "1.1.0"


def read_text(file: Packaged) -> str:
    """A text in UTF-8, unpacked where the file's name ends in .gz."""
    data = file.read()
    try:
        return (gzip.decompress(data) if file.path.suffix == ".gz" else data).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise file.error(f"is not a complete gzip file: {text_of(error)}") from None
    except UnicodeDecodeError as error:
        raise file.error(f"byte {error.start} is not UTF-8") from None


def read_table(file: Packaged, columns: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The columns of a CSV file by the names of its header line: all of them, or `columns`, of which each must be there."""
    try:
        lines = [line for line in csv.reader(io.StringIO(read_text(file), newline=""), strict=True) if line]
    except csv.Error as error:
        raise file.error(f"is not a table: {text_of(error)}") from None
    if len(lines) < 2:
        raise file.error("the table is empty")
    for row, cells in enumerate(lines[1:]):
        if len(cells) != len(lines[0]):
            raise file.error(f"{len(cells)} columns, but the header line has {len(lines[0])}", row=row)
    for name in columns or lines[0]:
        if lines[0].count(name) > 1:
            raise file.error(f'{lines[0].count(name)} columns are named "{name}"', dataset=name)
    return pick(file, {name: [line[i] for line in lines[1:]] for i, name in enumerate(lines[0])}, columns)


def pick(file: Packaged, table: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    """Those columns of a table; DataError with the first that it has not."""
    for name in columns or ():
        if name not in table:
            there = list(table)
            listed = ", ".join(map(str, there if len(there) <= 12 else [*there[:12], "..."]))
            raise file.error(f'no column "{name}" (there: {listed})', dataset=name)
    return {name: table[name] for name in columns} if columns is not None else table


def numbers(file: Packaged, column: str, cells: Sequence[str], row: int | None = None) -> NDArray[np.float64]:
    """A column's cells, or those of one `row`, as numbers. DataError with the row of the first that is no finite number."""
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        try:
            values[i] = float(cell)
        except (TypeError, ValueError):            # a cell of a data frame may be None
            values[i] = math.nan
        if not math.isfinite(values[i]):
            raise file.error(f'"{cell}" in column "{column}" is not a finite number', dataset=column,
                             row=i if row is None else row)
    return values


def labels(file: Packaged, column: str, cells: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """A column's cells as numbers of `classes`. DataError with the row of the first that is none of them."""
    numbers = {name: i for i, name in enumerate(classes)}
    for row, cell in enumerate(cells):
        if cell not in numbers:
            raise file.error(f'"{cell}" in column "{column}" is none of {", ".join(classes[:12])}', dataset=column, row=row)
    return np.array([numbers[cell] for cell in cells], np.int64)


def expect(file: Packaged, what: str, found: int, expected: int) -> None:
    """DataError unless as many rows, say, are there as a file of known content has: another version may have been cut off."""
    if found != expected:
        raise file.error(f"expected {expected:,} {what}, found {found:,}")


def read_frame(file: Packaged, name: str, columns: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The columns of the data frame `name` in R's .rda, by PyPI's package rdata, without R. Factors come as names of levels."""
    frames = _by_rdata(file, lambda rdata: rdata.read_rda(file.path), "R's .rda")
    if name not in frames:
        raise file.error(f'no data frame "{name}" (there: {", ".join(map(str, frames)) or "none"})', dataset=name)
    return _columns(file, frames[name], columns)


def read_lazy_frame(file: Packaged, name: str, columns: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The same from the file .rdb that R loads lazily, beside which an .rdx says where each object lies.

    There it has 4 bytes with its size, then its serialisation in zlib's format.
    """
    index = Packaged(file.path.with_suffix(".rdx"), file.cure)
    places = _by_rdata(index, lambda rdata: _object(rdata, gzip.decompress(index.read())), "R's .rdx")
    if not isinstance(places, dict) or not isinstance(places.get("variables"), dict):
        raise index.error("has no places of objects")
    if name not in places["variables"]:
        raise index.error(f'no data frame "{name}" (there: {", ".join(map(str, places["variables"])) or "none"})', dataset=name)
    start, size = (int(n) for n in places["variables"][name])
    packed = file.read()[start:start + size]
    if len(packed) < size:
        raise file.error(f'"{name}" should end at byte {start + size}, and the file has {start + len(packed)}', dataset=name)
    return _columns(file, _by_rdata(file, lambda rdata: _object(rdata, zlib.decompress(packed[4:])), "R's .rdb"), columns)


def _by_rdata(file: Packaged, read: Callable[[Any], Any], what: str) -> Any:
    """What `read` makes with the package rdata; whatever it meets is the file's fault."""
    python_package("rdata", RDATA)
    import rdata  # with pandas, and so half a second
    file.read()                                    # what the operating system refuses is said by it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")        # R's older files do not say that their text is ASCII
            return read(rdata)
    except Exception as error:                     # the reader's own, and those of three kinds of compression
        raise file.error(f"cannot be read as {what}: {' '.join(text_of(error).split())}") from None


def _object(rdata: Any, data: bytes) -> Any:
    return rdata.conversion.convert(rdata.parser.parse_data(data))


def _columns(file: Packaged, frame: Any, columns: Sequence[str] | None) -> dict[str, NDArray[Any]]:
    return {key: np.asarray(frame[key]) for key in pick(file, dict.fromkeys(frame.columns), columns)}


class Series(NamedTuple):
    """Values (n, L) of n series, the name of each one's class, and the names of all classes in the order of the file's head."""

    values: NDArray[np.float64]
    names: list[str]
    classes: list[str]


def read_series(file: Packaged) -> Series:
    """A .ts file of univariate series of one length with classes; those that its head does not list are in alphabetical order."""
    lines = [line.strip() for line in read_text(file).splitlines()]
    body = [i for i, line in enumerate(lines) if line.lower() == "@data"]
    if not body:
        raise file.error("has no line @data")
    said = [line[1:].split(None, 1) for line in lines[:body[0]] if line.startswith("@")]
    head = {words[0].lower(): words[1] for words in said if len(words) == 2}
    if head.get("targetlabel", "").lower() == "true" or head.get("classlabel", "").lower() == "false":
        raise file.error("its head says that the series have no classes, or have numbers; `data import npz` takes these")
    rows = [line.split(":") for line in lines[body[0] + 1:] if line and not line.startswith("#")]
    if not rows or any(len(row) != 2 or not row[1] for row in rows):
        bad = next((i for i, row in enumerate(rows) if len(row) != 2 or not row[1]), 0)
        raise file.error('expected "v,v,...,v:class" of one variable', row=bad)
    values = [numbers(file, "values", row[0].split(","), i) for i, row in enumerate(rows)]
    length = int(head["serieslength"]) if head.get("serieslength", "").isdecimal() else len(values[0])
    for row, series in enumerate(values):
        if len(series) != length:
            raise file.error(f"the series has {len(series)} values, and {length} were expected", dataset="values", row=row)
    names = [row[1].strip() for row in rows]
    return Series(np.stack(values), names, [*dict.fromkeys(head.get("classlabel", "").split()[1:])] or sorted(set(names)))
