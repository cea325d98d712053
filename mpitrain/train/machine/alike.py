"""The items in which the ranks of a run must be equal: configuration, versions, the user's code, and this package's own."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpitrain
from mpitrain.backend import native
from mpitrain.config.messages import toml
from mpitrain.config.sections import SECTIONS, Config
from mpitrain.files.disk import file_sha256
from mpitrain.kernels.kernel import kind
from mpitrain.registry import source_of
from mpitrain.train.machine.environment import versions

SOURCES = (".py", ".c", ".h")
PACKAGES = ("mpitrain", "numpy", "numba", "h5py")


def must_be_alike(config: Config) -> dict[str, str]:
    """Name and value of each item, as messages show them, but for the files of this package."""
    found = dict(items(config))
    files = {path.name if path.parent == config.folder else str(path): path for path in user_files(config)}
    found |= {f"the file {name} (SHA-256)": sha256(path) for name, path in files.items()}
    installed = versions()
    found |= {f"the version of {name}": installed.get(name, "absent") for name in PACKAGES}
    found["the byte order"] = sys.byteorder
    found["what kernels run as (MPITRAIN_KERNELS)"] = kind()
    return found


def sources() -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The files of this package, by names that are the same wherever it is installed."""
    def within(folder: str, name: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SOURCES):
                    yield f"{name}/{entry.name}", entry
                elif entry.name != "__pycache__" and entry.is_dir():
                    yield from within(entry.path, f"{name}/{entry.name}")
    yield from within(str(Path(mpitrain.__file__).parent), "mpitrain")
    yield from within(str(native.source_folder()), "native")


def same_files() -> str:
    """What ranks have alike if the package's files are the very same ones to them: host, device, inode, size and time of change.

    That is the inode's time, which no copy of a file takes along: hosts of one name, made from one image, differ in a file that
    was replaced on one of them. It takes a millisecond, of which hashing takes ten.
    """
    known = sorted((name, found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)
                   for name, entry in sources() for found in [entry.stat()])
    return hashlib.sha256(repr((socket.gethostname(), known)).encode()).hexdigest()


def contents() -> dict[str, str]:
    """The hash of each of the package's files."""
    return {f"the source {name} (SHA-256)": sha256(Path(entry.path)) for name, entry in sorted(sources(), key=lambda one: one[0])}


def items(config: Config) -> Iterator[tuple[str, str]]:
    """``section.key`` and the value as TOML, of every key."""
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        values |= values.pop("arguments", {})
        for key, value in values.items():
            yield f"{section}.{key}", f"{value.__module__}.{value.__qualname__}" if callable(value) else toml(value)


def user_files(config: Config) -> list[Path]:
    """The files of the user's code that the configuration names."""
    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from (text for inner in value.values() for text in texts(inner))
        elif isinstance(value, (list, tuple)):
            yield from (text for inner in value for text in texts(inner))
    named = [source_of(text, config.folder) for section in SECTIONS for text in texts(vars(getattr(config, section)))]
    return sorted({path for path in named if path is not None})


def sha256(path: Path) -> str:
    """The first 12 hexadecimal digits: enough to see a difference."""
    return file_sha256(path)[:12]
