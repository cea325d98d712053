"""The cache folder, and the loader of native code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpitrain.backend import cache, native
from mpitrain.backend.cache import cache_folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and nothing remembered from other tests or left to them."""
    remembered = (cache_folder, native.load, native.compiler, native._version, native._headers)
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_missing", {})
    for function in remembered:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in remembered:
        function.cache_clear()


@pytest.mark.promise("F8")
def test_the_cache_folder_is_private(own_cache: Path) -> None:
    assert cache_folder() == own_cache and own_cache.stat().st_mode & 0o077 == 0


@pytest.mark.promise("F8")
def test_a_folder_that_others_can_write_is_not_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mpitrain"


@pytest.mark.parametrize("others", [0o000, 0o011, 0o055])
def test_a_folder_that_others_can_only_read_or_pass_through_is_used(own_cache: Path, others: int) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o700 | others)
    assert cache_folder() == own_cache


@pytest.mark.parametrize("others", [0o020, 0o002])
@pytest.mark.promise("F8")
def test_a_folder_that_the_group_or_all_can_write_is_not_used(own_cache: Path, others: int) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o700 | others)
    assert cache_folder() != own_cache


def test_where_no_home_can_be_written_a_temporary_folder_stands_in(own_cache: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"mpitrain-{os.getuid()}"


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(own_cache: Path) -> None:
    assert native.load("rows") is not None
    built, = own_cache.glob("rows-*.so")
    made = built.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.load("rows") is not None and built.stat().st_mtime_ns == made and native.missing() == {}


@needs_compiler
def test_the_room_that_is_reserved_holds_the_largest_library() -> None:
    assert native.load("convolution") is not None                            # the largest by far
    largest = max(path.stat().st_size for path in native.cache_folder().glob("*.so"))
    assert largest <= native.ROOM


@needs_compiler
def test_a_library_that_is_empty_is_made_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "three.c").write_text("int three(void) { return 3; }\n")
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path)
    cc = native.compiler()
    assert cc is not None
    (cache_folder() / f"three-{native._key(tmp_path / 'three.c', cc)}.so").write_bytes(b"")
    library = native.load("three")
    assert library is not None and library.three() == 3 and native.missing() == {}


@needs_compiler
@pytest.mark.parametrize("damage", [lambda code: code[:3000], lambda code: code[:12000], lambda code: code[:-1],
                                    lambda code: code[:4096] + bytes(4096) + code[8192:]],
                         ids=["3000 bytes", "12000 bytes", "all but one", "a page of zeros"])
@pytest.mark.promise("F8")
def test_a_damaged_library_is_made_anew_and_ends_no_process(
        own_cache: Path, counting: dict[str, str], tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    together(LOAD_CALL, 1, counting)
    made, = own_cache.glob("call-*.so")
    whole = made.read_bytes()
    assert len(whole) > 12000
    made.write_bytes(damage(whole))
    together(LOAD_CALL, 1, counting)              # loading one that was cut off is a SIGBUS
    together(LOAD_CALL, 1, counting)
    assert (tmp_path / "log").read_text() == 2 * "compiled\n" and native.whole(made)


@needs_compiler
def test_the_compilers_command_is_split_as_a_shell_does_and_its_arguments_are_used(
        own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "five.c").write_text("int five(void) { return FIVE; }\n")
    (tmp_path / "wrapper one").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "wrapper one").chmod(0o755)
    found = native.compiler()
    assert found is not None
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path)
    monkeypatch.setenv("CC", f"'{tmp_path}/wrapper one' {found[0]} -DFIVE=5")
    native.compiler.cache_clear()
    library = native.load("five")
    assert native.compiler() == (f"{tmp_path}/wrapper one", found[0], "-DFIVE=5")
    assert library is not None and library.five() == 5
    monkeypatch.setenv("CC", f"'{tmp_path}/wrapper one' {found[0]} -DFIVE=6")
    for function in (native.compiler, native.load):
        function.cache_clear()
    changed = native.load("five")
    assert changed is not None and changed.five() == 6, "other arguments are another library"


@needs_compiler
def test_a_command_with_an_open_quote_is_no_command(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.compiler()
    monkeypatch.setenv("CC", "cc 'x")
    native.compiler.cache_clear()
    assert native.compiler() is not None and "x" not in str(native.compiler()) and found is not None


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@needs_compiler
def test_where_the_cache_folder_is_full_nothing_is_compiled_and_the_folder_is_named(
        own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkstemp", no_room)
    monkeypatch.setattr(native, "_compiled", lambda *_: pytest.fail("compiled for nothing"))
    assert native.load("rows") is None
    assert native.obstacle() == (f"the cache folder {own_cache} cannot be used: No space left on device",
                                 "make room there, or set MPITRAIN_CACHE_DIR to another folder")


@needs_compiler
def test_room_that_runs_out_at_the_end_leaves_no_part_of_a_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", no_room)
    assert native.load("call") is None and "No space left" in native.missing()["call"]
    assert not list(own_cache.glob("*.so")) and not list(own_cache.glob("*.tmp"))


def test_a_compiler_that_fails_is_named_with_what_it_says(
        own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "wanted", lambda: "")
    for text, said in (("exit 3", "exit status 3"), ("exit 0", "[Errno 2] No such file"),
                       ("echo fatal error: no room >&2; echo ended >&2; exit 1", "fatal error: no room")):
        (tmp_path / "bad").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bad").chmod(0o755)
        monkeypatch.setenv("CC", str(tmp_path / "bad"))
        monkeypatch.setattr(native, "_missing", {})
        for function in (native.compiler, native.load, native._version):
            function.cache_clear()
        assert native.load("rows") is None
        assert native.missing()["rows"].startswith(f"the C compiler {tmp_path}/bad fails: {said}")
        assert native.describe()["compiler"] == ""


@needs_compiler
def test_the_libraries_are_described_with_the_compiler_and_a_key_or_why_they_are_missing(
        own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    monkeypatch.setattr(native, "source_folder", lambda: folder)
    (folder / "good.c").write_text("int answer(void) { return 1; }\n")
    (folder / "bad.c").write_text("int answer(void) { return\n")
    told = native.describe()
    assert told["compiler"] and told["bad"].startswith("not compiled: ")
    assert told["good"] == "compiled " + next(own_cache.glob("good-*.so")).stem.removeprefix("good-")
    for function in (native.load, native.compiler):
        function.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    without = "not compiled: no C compiler (cc, gcc or clang)"
    assert native.describe() == {"compiler": "", "bad": without, "good": without}


@needs_compiler
def test_a_changed_source_or_header_is_compiled_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    monkeypatch.setattr(native, "source_folder", lambda: folder)
    (folder / "answer.h").write_text("#define ANSWER 1\n")
    (folder / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    first = native.load("answer")
    (folder / "answer.h").write_text("#define ANSWER 2\n")
    for function in (native.load, native._headers):           # as in the next process
        function.cache_clear()
    second = native.load("answer")
    assert first is not None and second is not None and (first.answer(), second.answer()) == (1, 2)


@needs_compiler
def test_source_that_does_not_compile_leaves_a_reason(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int wrong(void) { return missing_name; }\n")
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path)
    assert native.load("wrong") is None and set(native.missing()) == {"wrong"}
    assert not list(own_cache.glob("*.so"))


def test_without_a_compiler_the_stand_ins_serve(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "wanted", lambda: "")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    assert native.load("rows") is None and native.missing() == {"rows": "no C compiler (cc, gcc or clang)"}


COUNTING = """#!/bin/sh
case "$*" in *-o*) echo compiled >> {log};; esac
exec {cc} "$@"
"""
LOAD_CALL = "from mpitrain.backend import native; assert native.load('call') is not None"
LOAD_ROWS = "from mpitrain.backend import native; assert native.load('rows') is not None"


def together(program: str, n: int, environment: dict[str, str]) -> list[str]:
    """What `n` processes print that start at the same time."""
    children = [subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
                for _ in range(n)]
    printed = [child.communicate(timeout=400)[0] for child in children]
    assert [child.returncode for child in children] == [0] * n
    return printed


@pytest.fixture
def counting(own_cache: Path, tmp_path: Path) -> dict[str, str]:
    """An environment whose compiler writes a line to "log" for each library it makes."""
    (tmp_path / "log").touch()
    script = tmp_path / "cc"
    script.write_text(COUNTING.format(log=tmp_path / "log", cc=" ".join(native.compiler() or ())))
    script.chmod(0o755)
    return {**os.environ, "CC": str(script)}


@needs_compiler
def test_of_several_processes_that_start_together_one_compiles_and_a_later_one_none(
        own_cache: Path, tmp_path: Path, counting: dict[str, str]) -> None:
    together(LOAD_ROWS, 3, counting)
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert len(list(own_cache.glob("rows-*.so"))) == 1 and not list(own_cache.glob("*.tmp"))
    together(LOAD_ROWS, 1, counting)
    assert (tmp_path / "log").read_text() == "compiled\n"


@needs_compiler
def test_where_the_file_system_has_no_locks_each_compiles_and_all_load_the_same(
        own_cache: Path, tmp_path: Path, counting: dict[str, str]) -> None:
    program = ("import errno, fcntl\n"
               "def none(*_): raise OSError(errno.ENOLCK, 'no locks available')\n"
               "fcntl.flock = none\n") + LOAD_ROWS
    together(program, 2, counting)
    assert set((tmp_path / "log").read_text().split()) == {"compiled"}
    assert len(list(own_cache.glob("rows-*.so"))) == 1 and not list(own_cache.glob("*.tmp"))


def test_whoever_holds_the_lock_too_long_is_not_waited_for(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WAIT", 0.05)
    with cache.one_at_a_time("slow"), cache.one_at_a_time("slow"):
        pass


def test_where_no_lock_can_be_made_the_work_is_done_without(own_cache: Path) -> None:
    (cache_folder() / "taken.lock").mkdir()
    done = []
    with cache.one_at_a_time("taken"):
        done.append(True)
    assert done


NUMBA_WORDS = """
from mpitrain.kernels.kernel import prepare
prepare()
import numba.core.event as event
with event.install_recorder("numba:compile") as recorder:
    from mpitrain.backend import native
    from mpitrain.kernels.random import random_words
    import numpy as np
    random_words(np.arange(2, dtype=np.uint64), 7, 5)
assert set(native.missing()) == {"random"}
print(len([moment for moment, what in recorder.buffer if what.is_start]))
"""


@pytest.mark.slow
@pytest.mark.timeout(500)                     # importing Numba takes seconds, and here three processes do
def test_numba_compiles_in_one_of_several_processes_and_never_in_a_warm_run_and_writes_into_no_installation(
        own_cache: Path, tmp_path: Path) -> None:
    without = {k: v for k, v in os.environ.items() if k not in ("CC", "NUMBA_CACHE_DIR")} | {"PATH": "/nonexistent"}
    compiled = sorted(int(text) for text in together(NUMBA_WORDS, 2, without))
    assert compiled[0] == 0 and compiled[1] > 0, "one compiles, the other waits and finds it"
    assert together(NUMBA_WORDS, 1, without) == ["0\n"]
    assert list(own_cache.rglob("*.nbi")) and not list(Path(native.__file__).parents[1].rglob("*.nb[ic]"))
