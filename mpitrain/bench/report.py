"""Where results go: rank 0 prints a table as it grows, and writes one JSON object a line, with its date and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.backend.cpu import cpu_info
from mpitrain.comm.job.start import library_version
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import UsageError
from mpitrain.train.machine.environment import versions


class Report:
    """`line` and `record` do something on rank 0 only. The file is made anew at once, and is complete after every record; what
    was read from such a file keeps its date and command.

    UsageError where it is a folder; OSError, at once where that can be known, where it cannot be written.
    """

    def __init__(self, rank: int, path: Path | None):
        self._first, self._path = rank == 0, path
        if self._first and path is not None:
            if path.is_dir():
                raise UsageError(f"--json takes a file to write, found the folder {path}")
            self._write("w", "" if path.is_fifo() else "\n")  # A full disk takes an empty file, but not a byte.
            if path.is_file():
                os.truncate(path, 0)

    def line(self, text: str) -> None:
        if self._first:
            print(text, flush=True)

    def record(self, result: Mapping[str, Any]) -> None:
        if self._first and self._path is not None:
            about = {"date": str(datetime.date.today()), "command": shlex.join(["python", *sys.orig_argv[1:]])}
            self._write("a", json.dumps({**result, **{key: result.get(key, own) for key, own in about.items()}}) + "\n")

    def _write(self, mode: str, text: str) -> None:
        assert self._path is not None
        try:
            with open(self._path, mode) as file:
                file.write(text)
        except OSError as error:
            error.filename = str(self._path)                  # The error of a write has no file name.
            raise


def machine(channel: Channel) -> dict[str, Any]:
    """What the figures were measured on: processor, cores this rank may use and all of them, hosts, versions."""
    hosts = channel.gather_objects(socket.gethostname())
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "cores_a_rank": len(os.sched_getaffinity(0)),
            "hosts": len(set(hosts)), "mpi_library": library_version(), "versions": versions()}


def cpu_name() -> str:
    """The processor as Linux calls it, elsewhere the architecture."""
    return cpu_info().get("model name") or platform.machine()


def in_bytes(count: int) -> str:
    """``64 KiB``; numbers that are no whole multiple of a unit stay in bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def in_time(seconds: float) -> str:
    """``12.3 us`` below 10 ms, ``12.3 ms`` above."""
    return f"{seconds * 1e6:.1f} us" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def ratio_of(result: Mapping[str, float]) -> str:
    """``1.23 (1.20 .. 1.31)``: the median and the quartiles."""
    return f"{result['ratio']:.2f} ({result['ratio_low']:.2f} .. {result['ratio_high']:.2f})"
