"""What a device does besides arithmetic on arrays: it runs kernels of ``native/device``, by the array module of the arrays.

CuPy's is made at the first use (`mpitrain.backend.cuda`); another array module brings its own through `RUNTIMES`, as the tests'
stand-in for a GPU does, which runs the same kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.backend.native import source_folder

Grid = tuple[int, ...]
Launch = Callable[[Grid, int, Sequence[Any], int], None]
"""(grid of blocks, threads of a block, arguments: arrays, None, int for int64, float for double; bytes of shared memory)."""


class Operand(NamedTuple):
    """Matrices of a product in memory: number (i, j) of matrix b lies at b step + i leading + j; where they are stored
    `transposed`, at b step + j leading + i. In numbers, not in bytes.
    """

    transposed: bool
    leading: int
    step: int = 0


class ProductForm(NamedTuple):
    """out = alpha x y + beta out for `batch` matrices x (m, k), y (k, n), out (m, n), all but their addresses and the factors.

    `operands` is the format of x and y: "float32", "float64", "bfloat16" or "float16"; or "tf32": float32 whose products have 10
    bits of fraction, which nothing but this name asks for. `result` is the format of `out` and `bias` (n,): that of the operands,
    or float32. Sums are float32, of float64 float64. `ending` is what is done with them before they are written: "" nothing,
    "bias" is added to each row, or "gelu_tanh" taken (of the sum with the bias, where it is `biased`); or "row_sums": nothing,
    and the sums of each row of x (m,), which for a weight's gradient are the bias's, are written to `bias`.
    """

    m: int
    n: int
    k: int
    batch: int
    x: Operand
    y: Operand
    out: Operand
    operands: str
    result: str
    ending: str = ""
    biased: bool = False


class Runtime(Protocol):
    """Code of a device, launched in the order of the calls on its current stream; nothing waits for it."""

    def product(self, form: ProductForm, x: Any, y: Any, out: Any, bias: Any, alpha: float, beta: float) -> bool:
        """Launches a product, whose arrays begin where their first matrix does; False where a library serves no such form, and
        nothing has been done. What `out` has is not read where beta is 0."""

    def function(self, source: str, name: str) -> Launch | None:
        """The kernel `name` of ``native/device/<source>.cu``; None where it cannot be had, and array expressions serve."""


def _cuda() -> Runtime:
    made: Runtime = import_module("mpitrain.backend.cuda").Cuda()        # by name: that file imports this one
    return made


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
