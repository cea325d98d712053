"""The runtime of the stand-in for a GPU: kernels of native/device, built by the C++ compiler with on_host.h, on the CPU.

    from device_on_host import OnHost
    OnHost().function("pointwise", "relu_float32")((1,), 256, [x, y, 9], 0)

Arguments are checked by `mpitrain.kernels.device.code` before; arrays are those of `fakegpu`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import device_graphs
import device_races
import fakecuda
import numpy as np
from device_counts import note

from mpitrain.backend.cache import cache_folder, one_at_a_time
from mpitrain.backend.runtime import Grid, Launch, Operand, ProductForm, device_folder

FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-DON_HOST", "-w", "-fvisibility=hidden",
         "-fno-strict-aliasing", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-U_FORTIFY_SOURCE")
WRONG = {1: "threads of a block wait for others that never come", 2: "no GPU launches such a grid, or so much shared memory"}
INTEGERS, DOUBLES = 64, 8


@cache
def compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)


@cache
def library(source: str) -> ctypes.CDLL:
    """The source as a library of the host; compiled once for each content of the folder."""
    folder, found = device_folder(), compiler()
    assert found is not None, "no C++ compiler"
    digest = hashlib.sha256(" ".join([found, *FLAGS]).encode())
    for path in [*sorted(folder.glob("*.h")), folder / f"{source}.cu"]:
        digest.update(path.read_bytes())
    made = cache_folder() / f"device-{source}-{digest.hexdigest()[:20]}.so"
    with one_at_a_time(made.stem):
        if not made.exists():
            partial = made.with_suffix(f".{os.getpid()}.tmp")
            command = [found, *FLAGS, f"-I{folder}", "-x", "c++", str(folder / f"{source}.cu"), "-o", str(partial)]
            subprocess.run(command, check=True)
            partial.replace(made)
    return ctypes.CDLL(str(made))


class OnHost:
    """Runs one kernel at a time: fibres belong to the library. Launches are noted in `device_counts`; `launched` counts those
    of kernels since the process began, by name."""

    def __init__(self) -> None:
        self.launched: dict[str, int] = {}
        self._lock = threading.Lock()

    def product(self, form: ProductForm, x: Any, y: Any, out: Any, bias: Any, alpha: float, beta: float) -> bool:
        """By NumPy, of what the form says is at the arrays' first numbers; float32 for 16 bits."""
        note("product")
        made = matrices(out, form.out, form.batch, form.m, form.n)
        left, right = matrices(x, form.x, form.batch, form.m, form.k), matrices(y, form.y, form.batch, form.k, form.n)
        number, more = "float64" if form.operands == "float64" else "float32", None if bias is None else bias._memory

        def work() -> None:
            sums = np.float64(alpha) * np.matmul(left.astype(number), right.astype(number))
            if beta:
                sums += beta * made.astype(number)
            if form.ending == "row_sums":
                more[...] = left[0].astype(number).sum(axis=1)
            elif form.biased:
                sums += more.astype(number)
            if form.ending == "gelu_tanh":
                sums = 0.5 * sums * (1 + np.tanh(np.sqrt(2 / np.pi) * (sums + 0.044715 * sums ** 3)))
            made[...] = sums
        device_graphs.in_place(work)
        return True

    def function(self, source: str, name: str) -> Launch | None:
        if compiler() is None:
            return None
        code = library(source)
        address = ctypes.cast(getattr(code, name), ctypes.c_void_p)

        def launch(grid: Grid, threads: int, arguments: Sequence[Any], shared: int) -> None:
            integers: list[int] = []
            doubles: list[float] = []
            for x in arguments:
                if isinstance(x, float):
                    doubles.append(x)
                else:
                    integers.append(0 if x is None else x if isinstance(x, int) else x._memory.ctypes.data)
            assert len(integers) <= INTEGERS and len(doubles) <= DOUBLES, f"{name} has more arguments than on_host.h passes"
            whole = (*grid, 1, 1)[:3]
            note(name)
            self.launched[name] = self.launched.get(name, 0) + 1
            kept = [x._memory for x in arguments if not isinstance(x, int | float | None)]     # while a graph has the launch

            def work() -> None:
                with self._lock:
                    answer = code.run_on_host(
                        address, (ctypes.c_uint * 3)(*whole), (ctypes.c_uint * 3)(threads, 1, 1), ctypes.c_int64(shared),
                        (ctypes.c_int64 * INTEGERS)(*integers), (ctypes.c_double * DOUBLES)(*doubles))
                assert not answer, f"{name}, grid {whole}, {threads} threads, {len(kept)} arrays: {WRONG[answer]}"
            if device_races.watching():
                device_races.touch(fakecuda.get_current_stream(), name, [], kept)
            device_graphs.in_place(work)
        return launch


def matrices(x: Any, form: Operand, batch: int, rows: int, columns: int) -> np.ndarray:
    """The matrices (batch, rows, columns) that an operand of a product says lie at the first number of an array."""
    size = x._memory.itemsize
    strides = (1, form.leading) if form.transposed else (form.leading, 1)
    return np.lib.stride_tricks.as_strided(x._memory, (batch, rows, columns), tuple(size * s for s in (form.step, *strides)))
