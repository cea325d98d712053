"""Plain calls to the operating system, each error with its place, also for a full disk or a lost mount."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpitrain.errors import AccessError, CheckpointError, LostFolderError, MpitrainError, OutputError, StorageError

DTYPES = frozenset(("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                    "float16", "float32", "float64"))
BLOCK = 1 << 20      # bytes read and hashed at a time: fits in the cache of one core
FILE_MODE, FOLDER_MODE = 0o664, 0o775     # less the umask; what all may write, all may replace by a link to elsewhere
ELSEWHERE = "set run.out to"                                 # how an advice to write to another place begins
ADVICE = {errno.ENOSPC: "; free some space or {elsewhere} another file system",
          errno.EDQUOT: "; your quota is used up: free some space or {elsewhere} another file system",
          errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
          errno.EROFS: "; {elsewhere} a folder that can be written",
          errno.ENOTDIR: "; a file stands where a folder should: {elsewhere} another folder",
          errno.ENAMETOOLONG: "; {elsewhere} a shorter name",
          errno.ELOOP: "; a symbolic link stands where a file of ours should: remove it"}


def storage_error(error: OSError, doing: str, path: Path, *, offset: int | None = None, needed: int = 0,
                  elsewhere: str = ELSEWHERE) -> MpitrainError:
    """The operating system's error as the error class of its exit code; `needed` bytes are compared with the free ones.
    `elsewhere` is how an advice to write to another place begins."""
    number, text = error.errno or errno.EIO, f"{doing} failed: {said(error)}"
    if number == errno.ENOENT and not os.path.lexists(path.parent):
        return LostFolderError(f"{text}: the folder {path.parent} was moved or removed", file=path, offset=offset)
    if needed:
        text += f"; it needs {needed} bytes{free(path.parent)}"
    kind: type[MpitrainError] = StorageError
    if number in (errno.EACCES, errno.EPERM):
        kind, text = AccessError, text + f"; change its permissions or {elsewhere} a folder of yours"
    elif number in (errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
        kind = OutputError
    return kind(text + ADVICE.get(number, "").format(elsewhere=elsewhere), file=path, offset=offset)


def said(error: OSError) -> str:
    number = error.errno or errno.EIO
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def free(folder: Path) -> str:
    """The free space there, as the end of a message."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return ""                                       # the text only adds to a message that stands without it
    inodes = ", no inode (file) is free" if room.f_files and not room.f_favail else ""
    return f", {room.f_bavail * room.f_frsize} are free{inodes}"


def write_file(path: Path, chunks: Sequence[bytes | memoryview], error_of: Callable[..., MpitrainError] = storage_error, *,
               synced: bool = True) -> None:
    """Make the new file `path` of these byte buffers, with the space reserved first, and sync it.

    Refuses a path that exists: nothing is ever overwritten, no symbolic link followed. Raises what `error_of` makes of the
    operating system's error, with the arguments of `storage_error`.
    """
    views = [memoryview(chunk) for chunk in chunks]
    size = sum(len(view) for view in views)
    position: int | None = None
    doing = "making the file"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            doing = "reserving space"
            reserve(fd, size)
            doing, position = "writing", 0
            for view in views:
                write_fully(fd, view, position)
                position += len(view)
            doing, position = "syncing to the disk", None
            if synced:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise error_of(error, doing, path, offset=position, needed=size) from error


def replace_file(path: Path, text: str, suffix: str = ".tmp", *, synced: bool = True) -> None:
    """Makes `text` the content of `path`: a reader, or a crash, sees the old text or the new one. One process writes at a time.

    What is not `synced` may be lost, or be empty, after a power cut. `suffix` ends the name of the file while it is written.
    OutputError or StorageError where it cannot be.
    """
    work = path.with_name(path.name + suffix)
    try:
        work.unlink(missing_ok=True)                    # a killed process may have left one
        write_file(work, [text.encode()], synced=synced)
        os.replace(work, path)
    except OSError as error:
        raise storage_error(error, "writing", path) from error
    if synced:
        sync_folder(path.parent)


def reserve(fd: int, size: int, *, with_zeros: bool = False) -> None:
    """Make the file `size` bytes long, with space behind them where the file system can promise that.

    Where it cannot, `with_zeros` writes them: a mapped page that finds no space later would end the process by a signal.
    """
    if not size:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)
        for start in range(0, size if with_zeros else 0, BLOCK):
            write_fully(fd, memoryview(bytes(min(BLOCK, size - start))), start)


def write_fully(fd: int, view: memoryview, offset: int) -> None:
    """`os.pwrite` until everything is written: it may write less than it was given (2 GiB at most, or a signal)."""
    done = 0
    while done < len(view):
        n = os.pwrite(fd, view[done:], offset + done)
        if n == 0:
            raise OSError(errno.EIO, "wrote nothing")
        done += n


def make_folder(path: Path, *, synced: bool = True) -> None:
    """Make a folder that is not there yet, and its parents, so that they survive a power cut if `synced`."""
    if not path.parent.is_dir():
        make_folder(path.parent, synced=synced)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        return
    except OSError as error:
        raise storage_error(error, "making the folder", path) from error
    if synced:
        sync_folder(path.parent)


def refuse_strangers(path: Path) -> None:
    """AccessError where a folder is another user's, or every user may write it: they could plant links and exchange files.

    In a folder that all may write but where each deletes only what is his (sticky, as /tmp), that is not so. Where the system
    has no name for the owner (another machine's root, a container's outside), nothing can be said.
    """
    try:
        status = os.stat(path, follow_symlinks=False)
        unnamed = int(Path("/proc/sys/fs/overflowuid").read_text()) if Path("/proc/sys/fs/overflowuid").exists() else 65534
    except OSError as error:
        raise storage_error(error, "looking at the folder", path) from error
    if status.st_uid not in (os.geteuid(), unnamed):
        raise AccessError(f"the folder belongs to user {status.st_uid}, and this is user {os.geteuid()}: run as that user, or "
                          "copy the run to a folder of yours", file=path)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise AccessError("every user may write the folder, and could exchange the run's files; change that (chmod -R o-w) or "
                          "set run.out to another folder", file=path)


def sync_folder(path: Path, error_of: Callable[..., MpitrainError] = storage_error) -> None:
    """Make the names in a folder survive a power cut; a file's own fsync does not do that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise error_of(error, "syncing the folder to the disk", path) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """A file descriptor on the regular file `path`; errors while reading it carry the file's name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)   # NONBLOCK: a FIFO would wait
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError("expected a regular file", file=path)
            yield fd
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise CheckpointError("the file is missing", file=path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError("expected a regular file, found a symbolic link", file=path) from None
        raise storage_error(error, "reading", path) from error


def read_fully(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` (bytes) from `offset` of an open file."""
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise CheckpointError(f"the file ends {len(view) - done} bytes early: it is truncated", file=path,
                                  offset=offset + done)
        done += n


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file."""
    digest, position = hashlib.sha256(), 0
    with reading(path) as fd:
        block = memoryview(bytearray(min(BLOCK, os.fstat(fd).st_size + 1)))
        while n := os.preadv(fd, [block], position):
            digest.update(block[:n])
            position += n
    return digest.hexdigest()
