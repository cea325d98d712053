"""A C source of a test's own, compiled as ours are, and loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from mpitrain.backend import native


def compiled(folder: Path, source: str) -> ctypes.CDLL:
    """Skips the test where there is no compiler. Headers of native/ are named by their file names."""
    compiler = native.compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    for header in native.source_folder().glob("*.h"):
        source = source.replace(f'"{header.name}"', f'"{header}"')
    (folder / "source.c").write_text(source)
    native.compile_library(folder / "source.c", folder / "source.so", compiler)
    return ctypes.CDLL(str(folder / "source.so"))
