"""`optimizer.offload`: optimizer state on the host of a GPU, or in a file that is mapped into memory."""

from __future__ import annotations

import errno
import mmap
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from mpitrain.backend import Device
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import everywhere
from mpitrain.config.sections import Config
from mpitrain.errors import AccessError, MissingError, MpitrainError, StorageError
from mpitrain.files.disk import free, reserve, said
from mpitrain.optim import Optimizer
from mpitrain.optim.on_host import OnHost


def offloaded(make: Callable[[Any], Optimizer], way: str, folder: Path, storage: Any, device: Device,
              control: Objects) -> Optimizer:
    """The optimizer of `storage`, whose state lies where `way` says: "none", "host", or "file" in `folder`.

    With files it communicates: a rank whose disk has no room fails on all. `config.rules` has refused the impossible.
    """
    if way == "none":
        return make(storage)
    allocate = partial(in_a_file, folder) if way == "file" else None
    made: list[Optimizer] = []

    def open_them() -> None:
        if device.name != "cpu":
            made.append(OnHost(make, storage, allocate))
            return
        before, storage.allocate = storage.allocate, allocate
        try:
            made.append(make(storage))
        finally:
            storage.allocate = before
    everywhere(control, open_them)
    return made[0]


def in_a_file(folder: Path, nbytes: int) -> mmap.mmap:
    """A new file of `nbytes` bytes, mapped. MissingError, StorageError or AccessError if it cannot be made.

    It has no name, and is gone when the process is, however that ends. No later write finds a full disk.
    """
    with new_file(folder) as file:
        try:
            reserve(file.fileno(), nbytes, with_zeros=True)
            memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise no_file(error, folder, f"of {nbytes:,} bytes ") from error
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        memory.madvise(mmap.MADV_SEQUENTIAL)              # an update reads and writes all of it from front to back
    return memory


def new_file(folder: Path) -> IO[bytes]:
    """An open and empty file without a name in `folder`. MissingError, StorageError or AccessError if it cannot be made."""
    try:
        return tempfile.TemporaryFile(dir=folder, prefix=".optimizer-", buffering=0)
    except OSError as error:
        raise no_file(error, folder) from error


def files_folder(config: Config) -> Path:
    """The folder of the files of optimizer state."""
    return Path(config.optimizer.offload_folder or existing(Path(config.run.out)))


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there: a run's folder is made later, on the same file system."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def no_file(error: OSError, folder: Path, size: str = "") -> MpitrainError:
    number = error.errno or errno.EIO
    kind = MissingError if number in (errno.ENOENT, errno.ENOTDIR) else \
        AccessError if number in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
    return kind(f'optimizer.offload = "file": a file {size}for optimizer state cannot be made: '
                f"{said(error)}{free(folder) if size else ''}; set "
                'optimizer.offload_folder to a folder with room, or optimizer.offload = "none"', file=folder)
