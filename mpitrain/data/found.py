"""Which files a data path means: a name of ours, a file, or those of a folder, of which none is left out in silence."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.data.manifest import MANIFEST, read_manifest
from mpitrain.data.storage import reading
from mpitrain.errors import DataError, MissingError

BUILT_IN = {"digits": Path(__file__).parent / "digits"}
SUFFIXES = (".h5", ".hdf5", ".he5", ".nc", ".mat")
DENIED = "no permission to read the data; check the file's mode and owner"
LOOKED_INTO = 300      # files of a folder without such a suffix; each costs a way to the file server
SIGNATURE = b"\x89HDF\r\n\x1a\n"


def find_files(root: Path, apart: Path | None = None) -> tuple[list[Path], dict[str, Any] | None]:
    """The files behind a path in a fixed order, and the manifest of the folder where it has one.

    DataError where the folder has HDF5 files besides, other than `apart`: by their names, or by the first bytes of the first
    `LOOKED_INTO` others.
    """
    missing = (f"no such file or folder, and no built-in data set of that name (built in: {', '.join(sorted(BUILT_IN))}); "
               "set data.path")
    with reading(root, missing, DENIED, "cannot look at the data"):
        if not stat.S_ISDIR(root.stat().st_mode):
            return [root], None
        manifest = read_manifest(root / MANIFEST) if (root / MANIFEST).exists() else None
        entries = [entry for entry in os.scandir(root) if not entry.is_dir()]
        chosen = sorted(e.name for e in entries if Path(e.name).suffix.lower() in SUFFIXES) if manifest is None else \
            [shard["file"] for shard in manifest["shards"]]
        known = set(chosen)
        left = _left_out([entry for entry in entries if entry.name not in known and not entry.name.startswith(".")], apart)
    if left:
        names = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise DataError(f"the folder also holds {names}, " + (
            f"of which {MANIFEST} says nothing, so no run would train on it: move it away, or delete {MANIFEST} and make one of "
            f"all files (`mpitrain data index`)" if manifest else
            f"HDF5 by its content, but not by its name: no run would train on it; let it end in {SUFFIXES[0]}, or move it away"),
            file=root)
    if not chosen:
        raise MissingError(f"the folder has neither {MANIFEST} nor files ending in {', '.join(SUFFIXES)}", file=root)
    return [root / name for name in chosen], manifest


def _left_out(unread: list[os.DirEntry[str]], apart: Path | None) -> list[str]:
    """Names of files that are not read and look as if they were meant to be: HDF5 by name or first bytes."""
    others = sorted((e for e in unread if not e.name.lower().endswith(SUFFIXES)), key=lambda entry: entry.name)
    found = [e for e in unread if e.name.lower().endswith(SUFFIXES)] + list(filter(_is_hdf5, others[:LOOKED_INTO]))
    kept = os.path.realpath(apart) if apart else None
    return sorted(entry.name for entry in found if os.path.realpath(entry) != kept)


def _is_hdf5(entry: os.DirEntry[str]) -> bool:
    """Whether a file begins as HDF5 does; False where it cannot be read."""
    with suppress(OSError), open(os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return os.pread(file.fileno(), 8, 0) == SIGNATURE
    return False


def check_file(path: Path) -> tuple[int, int]:
    """(bytes, mtime in ns) of a file that is a regular one and starts like HDF5; nothing else is ever opened for parsing."""
    with (reading(path, "the data file is not there", DENIED, "reading the data failed"),
          open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file):       # A FIFO must not hang us.
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is not a regular file", file=path)
        place = 0
        while place < status.st_size and os.pread(file.fileno(), 8, place) != SIGNATURE:
            place = max(512, 2 * place)                       # The signature may follow a user block of 512 * 2**k bytes.
    if place >= status.st_size:
        hint = "the file is empty" if status.st_size == 0 else "no HDF5 signature found"
        raise DataError(f"is not an HDF5 file ({hint}); `mpitrain data import` converts IDX, NPZ, CSV, images and text",
                        file=path, offset=0)
    return status.st_size, status.st_mtime_ns
