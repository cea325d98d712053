"""Kernels of ``native/device`` on a GPU, by CuPy: compiled by NVRTC at the first use, kept by CuPy's cache on the disk.

CuPy is imported where this module is. (A first step with nothing in the cache compiles about a second for each source.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy

from mpitrain.backend.cubins import OPTIONS
from mpitrain.backend.runtime import Grid, Launch, device_folder


class Cuda:
    """The `Runtime` of CuPy's arrays, on the current device and stream."""

    def __init__(self) -> None:
        self._module = cache(self._compiled)

    def function(self, source: str, name: str) -> Launch | None:
        kernel = self._module(source).get_function(name)

        def launch(grid: Grid, threads: int, arguments: Sequence[Any], shared: int) -> None:
            kernel(grid, (threads,), arguments, shared_mem=shared)
        return launch

    @staticmethod
    def _compiled(source: str) -> Any:
        folder = device_folder()
        return cupy.RawModule(code=(folder / f"{source}.cu").read_text(), options=(*OPTIONS, f"-I{folder}"))
