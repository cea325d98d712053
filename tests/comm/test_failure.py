"""What each exception becomes: code, exit status, place, and one printable line."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpitrain
from mpitrain.comm.job.failure import describe, printable, write_record
from mpitrain.errors import DataError, MeshError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(("error", "code", "exit_code"), [
    (DataError("bad", code="E_DATA_CHECKSUM"), "E_DATA_CHECKSUM", 65),
    (MeshError("does not fit"), "E_MESH", 78),
    (KeyboardInterrupt(), "E_INTERRUPT", 130),
    (MemoryError(), "E_MEMORY", 71),
    (SystemExit(3), "E_EXIT", 70),
    (SystemExit(85), "E_EXIT", 70),
    (SystemExit(256), "E_EXIT", 70),
    (SystemExit("text"), "E_EXIT", 70),
    (OSError(errno.ENOSPC, "No space left on device", "x.h5"), "E_IO", 74),
    (OSError(errno.EIO, "Input/output error"), "E_IO", 74),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "E_IO", 74),
    (PermissionError(errno.EACCES, "Permission denied", "x.h5"), "E_PERMISSION", 77),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.h5"), "E_MISSING", 66),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "E_MISSING", 66),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/x"), "E_MISSING", 66),
    (OSError(errno.EROFS, "Read-only file system", "out"), "E_OUTPUT", 73),
    (OSError(errno.EFBIG, "File too large"), "E_IO", 74),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "E_MEMORY", 71),
    (OSError(errno.EMFILE, "Too many open files"), "E_IO", 74),
    (OSError(errno.EADDRINUSE, "Address already in use"), "E_USER", 70),
    (KeyError("x"), "E_USER", 70),
])
def test_every_exception_has_a_code_and_an_exit_status(error: BaseException, code: str, exit_code: int) -> None:
    failure = describe(raised(error))
    assert (failure.code, failure.exit_code) == (code, exit_code)
    assert "Traceback" in failure.traceback


def test_the_line_names_rank_host_and_place() -> None:
    error = DataError("chunk 5 differs", step=1200, file="s-0007.h5", offset=81920)
    line = describe(error).line(3, 8)
    assert line.startswith("mpitrain: E_DATA rank=3/8 host=")
    assert line.endswith(' step=1200 file="s-0007.h5" offset=81920: chunk 5 differs')


def test_a_file_of_the_operating_systems_error_is_a_field() -> None:
    line = describe(raised(FileNotFoundError(errno.ENOENT, "No such file or directory", b"a\xffb"))).line(0, 1)
    assert line.endswith(r'file="a\xffb": No such file or directory')


def test_an_error_of_the_operating_system_without_a_file_says_where_it_was_met_and_what_to_change() -> None:
    assert re.fullmatch(r"No such file or directory at test_failure.py:\d+ in raised",
                        describe(raised(FileNotFoundError(errno.ENOENT, "No such file or directory"))).message)
    assert re.fullmatch(r"Too many open files at \S+ in raised; raise the limit on open files .*ulimit -n.*",
                        describe(raised(OSError(errno.EMFILE, "Too many open files"))).message)


@pytest.mark.promise("A1")
def test_a_current_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as found:
        os.getcwd()
    failure = describe(found.value)
    assert failure.exit_code == 66 and failure.message.startswith("the folder that this process was started in is gone")


def code_of(file: str, text: str, name: str, **names: object) -> Any:
    """The function `name` of a program `text` in a file called so, which need not be there."""
    space: dict[str, object] = {"__name__": name, **names}
    exec(compile(text, file, "exec"), space)
    return space[name]


OURS = "def ours(f):\n    return f()\n"
USERS = "import numpy\ndef user(f):\n    return f()\n"


@pytest.mark.parametrize(("text", "code", "where"), [
    ("user(lambda: ours(lambda: user(fails)))", "E_USER", r"at test_failure.py:\d+ in fails"),
    ("ours(lambda: user(fails))", "E_USER", r"at test_failure.py:\d+ in fails"),
    ("ours(lambda: user(lambda: numpy.zeros((2, 3)) @ numpy.zeros(2)))", "E_USER", r"at a.py:1 in <lambda>"),
    ("ours(lambda: user(lambda: numpy.linalg.inv(numpy.zeros((2, 2)))))", "E_USER", r"at a.py:1 in <lambda>"),
    ("ours(lambda: user(lambda: json.loads('{')))", "E_USER", r"at a.py:1 in <lambda>"),
    ("ours(fails_inside)", "E_USER", r"at theirs.py:2 in inside"),
    ("ours(lambda: user(lambda: package(fails_inside)))", "E_USER", r"at a.py:1 in <lambda>"),
    ("ours(lambda: user(lambda: broken()))", "E_BUG", r"at made.py:2 in broken, called at a.py:1 in <lambda>"),
    ("ours(lambda: user(lambda: inverse()))", "E_BUG", r"at \S+.py:\d+ in \w+, called at a.py:1 in <lambda>"),
    ("broken()", "E_BUG", r"at made.py:2 in broken, called at a.py:1 in main")])
def test_an_error_is_the_users_where_a_file_of_his_raised_it_and_ours_where_a_file_of_ours_did(text: str, code: str,
                                                                                              where: str) -> None:
    def fails() -> None:
        raise ValueError("odd")
    site, made = "/usr/lib/python3/site-packages/theirs.py", str(Path(mpitrain.__file__).with_name("made.py"))
    main = code_of("/home/a.py", f"def main(): {text}\n", "main", np=np, numpy=np, json=json, fails=fails,
                   ours=code_of(made, OURS, "ours"), user=code_of("/home/b.py", USERS, "user"),
                   broken=code_of(made, "def broken():\n    raise ValueError('odd')\n", "broken"),
                   inverse=code_of(made, "def inverse():\n    np.linalg.inv(np.zeros((2, 2)))\n", "inverse", np=np),
                   package=code_of(site, "def package(f):\n    return f()\n", "package"),
                   fails_inside=code_of(site, "def inside():\n    raise ValueError('odd')\n", "inside"))
    try:
        main()
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next     # type: ignore[union-attr]  # this file is a user's, too
        failure = describe(error)
    assert (failure.code, failure.exit_code) == (code, 70)
    assert re.match(rf"(ValueError|LinAlgError|JSONDecodeError) {where}: .", failure.message), failure.message


def test_an_error_of_ours_below_no_code_of_a_users_is_a_bug_of_ours() -> None:
    made = str(Path(mpitrain.__file__).with_name("made.py"))
    try:
        code_of(made, "def broken():\n    raise KeyError('x')\n", "broken")()
    except KeyError as error:
        error.__traceback__ = error.__traceback__.tb_next     # type: ignore[union-attr]
        failure = describe(error)
    assert (failure.code, failure.exit_code, failure.message) == ("E_BUG", 70, "KeyError at made.py:2 in broken: 'x'")


def test_a_bug_says_which_line_of_code() -> None:
    assert describe(raised(ValueError("odd"))).message.startswith("ValueError at test_failure.py:")


@pytest.mark.parametrize("error", [StopIteration(), AssertionError(), OSError(), ValueError("")])
def test_a_bug_without_a_text_is_named_by_its_type_and_place(error: BaseException) -> None:
    assert re.fullmatch(type(error).__name__ + r" at test_failure.py:\d+ in raised", describe(raised(error)).message)


def test_an_allocation_that_failed_without_a_text_says_so() -> None:
    message = describe(raised(MemoryError())).message
    assert re.match(r"out of memory at test_failure.py:\d+ in raised: an allocation failed; use a", message)


@pytest.mark.promise("A3")
def test_a_limit_on_memory_is_named_beside_the_allocation_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1500 << 20, -1))
    assert "an allocation failed (a process may have 1500 MiB: ulimit -v); use a" in describe(raised(MemoryError())).message


@pytest.mark.promise("A3")
@pytest.mark.parametrize("error", [ImportError("h5z.so: failed to map segment from shared object"),
                                   RuntimeError("can't start new thread")])
def test_below_a_limit_on_memory_a_library_or_thread_that_finds_no_room_is_no_bug(monkeypatch: pytest.MonkeyPatch,
                                                                                 error: Exception) -> None:
    assert describe(raised(error)).code == "E_USER"                            # the control: there is no limit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500 << 20, -1))
    failure = describe(raised(error))
    assert (failure.code, failure.exit_code) == ("E_MEMORY", 71)
    assert f"{error} (a process may have 500 MiB: ulimit -v); use a" in failure.message
    assert describe(raised(type(error)("no such symbol"))).code == "E_USER"


@pytest.mark.promise("F10")
def test_the_line_is_short_printable_ascii_whatever_the_message() -> None:
    line = describe(DataError("\u00fc\n\x1b[0m\x00" * 300)).line(0, 2)
    assert len(line) == 500 and line.isascii() and line.isprintable() and line.endswith("...")
    assert printable("\u00fc\n\udcff") == r"\xc3\xbc\x0a\xff"


def test_a_long_path_leaves_room_for_what_was_wrong_with_it() -> None:
    line = describe(DataError("the file is damaged", step=7, file="/" + "a\u00fc" * 10_000 + ".h5", offset=12)).line(0, 1)
    assert len(line) <= 500 and " step=7 file=\"/a" in line and line.endswith('.h5" offset=12: the file is damaged')
    long = describe(DataError("word " * 200, file="/" + "a" * 1000)).line(0, 1)
    assert len(long) == 500 and long.count("word") > 30 and long.count("a") > 150


@pytest.mark.promise("F7")
def test_the_record_replaces_an_older_one_and_is_private(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    old = tmp_path / "errors" / "rank-2.json"
    old.write_text("x" * 10_000)
    old.chmod(0o644)
    write_record(tmp_path, describe(raised(ValueError("odd"))), 2, 4)
    assert json.loads(old.read_text())["rank"] == 2
    assert stat.S_IMODE(os.stat(old).st_mode) == 0o600


@pytest.mark.promise("F7")
def test_the_record_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "errors" / "rank-0.json").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_record(tmp_path, describe(ValueError()), 0, 1)
    assert (tmp_path / "precious").read_text() == "keep"
