"""Files the data tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import pytest
from real_data import FOLDER

from mpitrain.data import probe


@pytest.fixture
def plain_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes arrays to an HDF5 file with h5py; an array may come with `create_dataset` options."""
    def write(name: str = "plain.h5", *, userblock_size: int | None = None, **arrays: Any) -> Path:
        path = tmp_path / name
        with h5py.File(path, "w", userblock_size=userblock_size) as file:
            for key, value in arrays.items():
                values, options = value if isinstance(value, tuple) else (value, {})
                file.create_dataset(key.replace("__", "/"), data=values, **options)
        return path
    return write


@pytest.fixture(scope="module")
def one_parser() -> Iterator[None]:
    """One child process, another where it has ended, describes the files of all tests of a file: each takes 0.2 s to start. Not
    for files that it may not get over."""
    usual, kept = probe.Parser, [probe.Parser()]

    def given(limits: probe.Limits = probe.Limits(), process: Any = None) -> Any:          # noqa: B008
        if process is not None or limits != probe.Limits():
            return usual(limits, process)
        if kept[-1].process is not None and kept[-1].process.poll() is not None:
            kept.append(usual())
        return nullcontext(kept[-1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probe, "Parser", given)
        yield
    for parser in kept:
        parser.__exit__()


@pytest.fixture
def real_data() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"the folder of real inputs is not there ({FOLDER})")
    return FOLDER
