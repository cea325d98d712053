"""Compiled kernels of a GPU are kept, by one process; a folder that takes nothing ends no run."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from mpitrain.backend import cubins


def test_a_cubin_is_made_once(tmp_path: Path) -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"cubin")
        return made[-1]
    file = tmp_path / "kernels.cubin"
    assert cubins.keep(file, make) is None and cubins.keep(file, make) is None
    assert file.read_bytes() == b"cubin" and made == [b"cubin"]


def test_where_it_cannot_be_written_a_run_goes_on_with_what_it_has_made_and_says_so_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", full)
    said = f"compiled kernels cannot be kept in {tmp_path} .*No space left on device.*make room there, or set MPITRAIN_CACHE_DIR"
    with pytest.warns(RuntimeWarning, match=said):
        assert cubins.keep(tmp_path / "a.cubin", lambda: b"a") == b"a"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.keep(tmp_path / "b.cubin", lambda: b"b") == b"b"
    assert list(tmp_path.glob("*cubin*")) == [] and list(tmp_path.glob("*.[0-9]*")) == []


def test_two_nodes_whose_folder_has_no_locks_do_not_write_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of containers have equal numbers, too."""
    file, write = tmp_path / "kernels.cubin", Path.write_bytes
    others = [b"theirs"]

    def interrupted(path: Path, content: bytes) -> int:
        written = write(path, content)
        if others:
            cubins.keep(file, others.pop)
        return written
    monkeypatch.setattr(Path, "write_bytes", interrupted)
    monkeypatch.setattr(cubins, "one_at_a_time", lambda name, wait: nullcontext(True))
    assert cubins.keep(file, lambda: b"ours") is None and file.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [file]
