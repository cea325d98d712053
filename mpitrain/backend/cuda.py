"""Kernels of ``native/device`` on a GPU, by CuPy: compiled by NVRTC at the first use, kept in the private cache.

Not in CuPy's, which would not do: it tells sources apart by their own text, without that of headers, and compiles them with
``-ftz=true``, by which numbers below 1e-38 become 0 and bits are not the host's.

CuPy is imported where this module is. (A first step with nothing in the cache compiles about a second for each source.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
from cupy.cuda import compiler

from mpitrain.backend.cache import cache_folder
from mpitrain.backend.cubins import OPTIONS, keep, version
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
        folder, target = device_folder(), cupy.cuda.Device().compute_capability
        path = folder / f"{source}.cu"
        name = f"{source}-{target}-{version(path, target, cupy.__version__, compiler._get_nvrtc_version())}.cubin"
        kept = cache_folder() / name
        made = keep(kept, lambda: compiler.compile_using_nvrtc(
            path.read_text(), (*OPTIONS, f"-I{folder}"), filename=path.name, cache_in_memory=True)[0])     # in no temporary file
        if made is None:
            return cupy.RawModule(path=str(kept))
        module = cupy.cuda.function.Module()
        module.load(made)
        return module
