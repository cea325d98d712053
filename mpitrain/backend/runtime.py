"""What a device does besides arithmetic on arrays: it runs kernels of ``native/device``, by the array module of the arrays.

CuPy's is made at the first use (`mpitrain.backend.cuda`); another array module brings its own through `RUNTIMES`, as the tests'
stand-in for a GPU does, which runs the same kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from mpitrain.backend.native import source_folder

Grid = tuple[int, ...]
Launch = Callable[[Grid, int, Sequence[Any], int], None]
"""(grid of blocks, threads of a block, arguments: arrays, None, int for int64, float for double; bytes of shared memory)."""


class Runtime(Protocol):
    """Code of a device, launched in the order of the calls on its current stream; nothing waits for it."""

    def function(self, source: str, name: str) -> Launch | None:
        """The kernel `name` of ``native/device/<source>.cu``; None where it cannot be had, and array expressions serve."""


def _cuda() -> Runtime:
    from mpitrain.backend.cuda import Cuda
    return Cuda()


RUNTIMES: dict[str, Callable[[], Runtime]] = {"cupy": _cuda}


@cache
def runtime(module: str) -> Runtime | None:
    """The runtime of an array module, by the module's name; None for the host's."""
    make = RUNTIMES.get(module)
    return None if make is None else make()


def address(array: Any) -> int:
    """The address of an array's memory on its device."""
    return int(array.data.ptr)


def device_folder() -> Path:
    """``native/device``, which has a source for each family of kernels, and their headers."""
    return source_folder() / "device"
