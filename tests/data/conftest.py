"""Files the data tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
from real_data import FOLDER


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


@pytest.fixture
def real_data() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"the folder of real inputs is not there ({FOLDER})")
    return FOLDER
