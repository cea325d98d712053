"""Kernels of ``native/device`` on a GPU, by CuPy: compiled by NVRTC at the first use, kept by CuPy's cache on the disk.

CuPy is imported where this module is. (A first step with nothing in the cache compiles about a second for each source.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy

from mpitrain.backend.cubins import OPTIONS
from mpitrain.backend.cublaslt import WORKSPACE, CublasLt, load
from mpitrain.backend.runtime import Grid, Launch, ProductForm, device_folder

GRAPHS = -1                              # no stream's handle


class Cuda:
    """The `Runtime` of CuPy's arrays, on the current device and stream."""

    def __init__(self) -> None:
        self._module = cache(self._compiled)
        self._products = cache(self._library)
        self._workspace = cache(self._memory)

    def function(self, source: str, name: str) -> Launch | None:
        kernel = self._module(source).get_function(name)

        def launch(grid: Grid, threads: int, arguments: Sequence[Any], shared: int) -> None:
            kernel(grid, (threads,), arguments, shared_mem=shared)
        return launch

    def product(self, form: ProductForm, x: Any, y: Any, out: Any, bias: Any, alpha: float, beta: float) -> bool:
        device = cupy.cuda.runtime.getDevice()
        library = self._products(device)
        if library is None:
            return False
        stream = cupy.cuda.get_current_stream()
        workspace = self._workspace(device, GRAPHS if stream.is_capturing() else stream.ptr)
        addresses = x.data.ptr, y.data.ptr, out.data.ptr, 0 if bias is None else bias.data.ptr
        return library.run(form, addresses, alpha, beta, stream.ptr, workspace.data.ptr)

    @staticmethod
    def _library(device: int) -> CublasLt | None:
        """cuBLASLt on the current device, of that number; None where it is not installed."""
        found = load()
        return None if found is None else CublasLt(found)

    @staticmethod
    def _memory(device: int, stream: int) -> Any:
        """The workspace of products on a stream; and one for those of all graphs, which are launched one after the other."""
        return cupy.empty(WORKSPACE, "uint8")

    @staticmethod
    def _compiled(source: str) -> Any:
        folder = device_folder()
        return cupy.RawModule(code=(folder / f"{source}.cu").read_text(), options=(*OPTIONS, f"-I{folder}"))
