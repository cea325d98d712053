"""The journal of a study: one record a line, appended and synced before anybody acts on it.

A line is a JSON object whose last key, crc, is the CRC-32 of the text before it. The first record is the header of the study;
the others are those of `search.table`. A process that is killed leaves at most one torn line at the end, which is dropped; every
other damage is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import CheckpointError, MissingError, OutputError
from mpitrain.files.disk import storage_error, sync_folder
from mpitrain.search.table import Record

NAME = "journal.jsonl"
END = re.compile(r', "crc": "([0-9a-f]{8})"\}\Z')
HEADER = "study"


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as its line; numbers that are not finite become null, since JSON has none."""
    text = json.dumps(finite(record), allow_nan=False)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def record_of(line: bytes) -> Record:
    """The record of a line without its end; ValueError where it is damaged."""
    text = line.decode()
    found = END.search(text)
    if found is None or zlib.crc32((whole := text[:found.start()] + "}").encode()) != int(found[1], 16):
        raise ValueError("the checksum does not fit")
    record = json.loads(whole)
    if not isinstance(record, dict):
        raise ValueError("no object")
    return record


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def write(fd: int, lines: bytes) -> None:
    """Appends all bytes, and returns when they are on the disk. Where that fails, for the disk is full, none of them stays: what
    another group writes behind half a line would be damage."""
    before = os.fstat(fd).st_size
    try:
        while lines:
            lines = lines[os.write(fd, lines):]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, before)
        raise


class Journal:
    """The file of a study's records. Who appends must be the only one that does so at that time."""

    def __init__(self, path: Path):
        self.path = path

    def create(self, header: Mapping[str, Any]) -> None:
        """Begins the journal of a new study. OutputError where there is one."""
        line = line_of({"kind": HEADER, **header})
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
            try:
                write(fd, line)
            finally:
                os.close(fd)
        except FileExistsError:
            raise OutputError("there is the journal of a study already; go on with it (--resume), delete it (--overwrite), or "
                              "set run.out to another folder", file=self.path) from None
        except OSError as error:
            raise storage_error(error, "beginning the journal", self.path) from error
        sync_folder(self.path.parent)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Writes records behind the others, and returns when they are on the disk."""
        lines = b"".join(map(line_of, records))
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                write(fd, lines)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, "writing to the journal", self.path, needed=len(lines)) from error

    def read(self) -> tuple[list[Record], str]:
        """All records, the header first, and a line to tell the user where a torn one at the end was left out, or "".

        MissingError where there is no journal, CheckpointError for a damaged line that is not the last.
        """
        records, _, torn = self._scan()
        return records, (f"{self.path}: the last line was torn, and is left out ({torn} bytes)" if torn else "")

    def mend(self) -> None:
        """Cuts a torn line off the end, so that the next record begins a line of its own."""
        _, whole, torn = self._scan()
        if torn:
            try:
                os.truncate(self.path, whole)
            except OSError as error:
                raise storage_error(error, "cutting off the torn line", self.path) from error

    def _scan(self) -> tuple[list[Record], int, int]:
        """The records, the number of bytes that they take, and of those of a torn line after them."""
        content = self._content()
        *lines, rest = content.split(b"\n")
        records, offset = list[Record](), 0
        for number, line in enumerate(lines, 1):
            try:
                records.append(record_of(line))
            except ValueError as error:
                if number < len(lines) or rest:
                    raise CheckpointError(f"line {number} of the journal is damaged ({error}); restore the file, or delete all "
                                          "lines from there on", file=self.path, offset=offset) from None
                break
            offset += len(line) + 1
        if not records or records[0].get("kind") != HEADER:
            raise CheckpointError("the journal does not begin with the header of a study; start anew with --overwrite",
                                  file=self.path)
        return records, offset, len(content) - offset

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError("there is no journal of a study to go on with; start one without --resume",
                               file=self.path) from None
        except OSError as error:
            raise storage_error(error, "reading the journal", self.path) from error
