"""Kernels of ``native/device`` on a GPU, by CuPy: compiled by NVRTC, ahead (`backend.compiling`) or at the first use, and kept in
the private cache.

Not in CuPy's, which would not do: it tells sources apart by their own text, without that of headers, and compiles them with
``-ftz=true``, by which numbers below 1e-38 become 0 and bits are not the host's.

CuPy is imported where this module is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import compiler

from mpitrain.backend import cubins
from mpitrain.backend.cache import cache_folder
from mpitrain.backend.cubins import OPTIONS, version
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
            # CuPy makes of a None an argument that lies at address 0, where the driver reads it; of an int one of 64 bits.
            kernel(grid, (threads,), [0 if x is None else x for x in arguments], shared_mem=shared)
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
        target = cupy.cuda.Device().compute_capability
        made = keep(source, target)
        if made is None:
            return cupy.RawModule(path=str(kept_at(source, target)))
        module = cupy.cuda.function.Module()
        module.load(made)
        return module


def kept_at(source: str, target: str) -> Path:
    """Where a source's code is kept for GPUs of this compute capability ("90"): a file of its own for all that it is made of."""
    made_of = version(device_folder() / f"{source}.cu", target, cupy.__version__, compiler._get_nvrtc_version())
    return cache_folder() / f"{source}-{target}-{made_of}.cubin"


def keep(source: str, target: str, wait: float | None = None) -> bytes | None:
    """Compiles a source for the current device, whose compute capability is `target`, where it is not kept; the code itself where
    it cannot be kept. Another process that is at it is waited for; with `wait` 0 it is left to it."""
    path = device_folder() / f"{source}.cu"
    return cubins.keep(kept_at(source, target), lambda: compiler.compile_using_nvrtc(
        path.read_text(), (*OPTIONS, f"-I{path.parent}"), filename=path.name, cache_in_memory=True)[0], wait)
