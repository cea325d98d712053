"""Calls every kernel with wrong dtypes, shapes, strides and sizes, its arrays between pages that nobody may touch.

    python benchmarks/kernel_fuzz.py [--calls 100000] [--seed 0] [--kind c] [--kernels NAME ...]

Each call takes the arguments of tests/kernel_examples.py, with up to four changes. Arrays end where a page of no access begins
(or begin where one ends), those that the kernel makes too, so that a number read or written outside of one ends the process, a
child of this one; on the other side of an array lie bytes that must stay what they are. What may come of a call is a result or
an exception. `--kind numba` calls the loops of Numba, `numpy` the expressions. Prints the deaths, each with what repeats it: the
exit status is 1 where there are any.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import importlib
import mmap
import os
import pkgutil
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests", ".")]
PAGE, ROOM, REGIONS = 4096, 1 << 21, 64
BESIDE, MARK = 256, 0xA5                          # bytes beside an array, and what is in them
CHANGED = 3                                       # exit status of a child where they are something else
LONGEST_S, MOST_BYTES = 30, 2 << 30               # of a call, and of memory
WIRE = {"pack": "fh", "unpack": "hf", "round": "fh", "add": "hf", "add_pack": "hfh", "add_round": "hfh"}
DTYPES = ["float32", "float64", "int32", "int64", "uint64", "uint8", "bool", "float16", "uint16", "complex64", ">f4", ">f8"]
NUMBERS: list[Any] = [None, -1, 0, 1, 2, 3, 7, 8, 1000, 1 << 31, 1 << 40, -(1 << 62), (1 << 63) - 1, 1 << 70, 0.5, -3.0,
                      float("nan"), float("inf"), True, "text", [1, 2]]


class Guarded:
    """Memory between pages of no access: `REGIONS` of them, each of `ROOM` bytes."""

    def __init__(self) -> None:
        step = ROOM + PAGE
        self.map = mmap.mmap(-1, REGIONS * step + PAGE)
        self.bytes = np.frombuffer(self.map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for i in range(REGIONS + 1):
            if libc.mprotect(ctypes.c_void_p(self.bytes.ctypes.data + i * step), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.next, self.ends, self.beside = 0, True, list[np.ndarray]()

    def begin(self, ends: bool) -> None:
        """Forgets all arrays; new ones end, or begin, with their memory."""
        self.next, self.ends, self.beside = 0, ends, []

    def is_whole(self) -> bool:
        """Whether the bytes beside all arrays are what they were."""
        return all((part == MARK).all() for part in self.beside)

    def empty(self, shape: Any, dtype: Any = np.float64, alignment: int = 1) -> np.ndarray:
        dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if dtype.hasobject or any(n < 0 for n in shape):
            return np.empty(shape, dtype)
        size = dtype.itemsize
        for n in shape:
            size *= int(n)
        if size > ROOM or self.next == REGIONS:
            raise MemoryError
        begin = self.next * (ROOM + PAGE) + PAGE
        self.next += 1
        at = begin + (ROOM - size) // alignment * alignment if self.ends else begin
        for part in (self.bytes[max(at - BESIDE, begin):at], self.bytes[at + size:min(at + size + BESIDE, begin + ROOM)]):
            part[...] = MARK
            self.beside.append(part)
        return self.bytes[at:at + size].view(dtype).reshape(shape)

    def copy(self, array: Any) -> np.ndarray:
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made


class Numpy:
    """NumPy, whose new arrays are guarded."""

    def __init__(self, memory: Guarded):
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        return self.memory.empty(shape, dtype)

    def empty_like(self, array: Any) -> np.ndarray:
        like = np.empty_like(array)
        return self.memory.empty(like.shape, like.dtype) if like.flags.c_contiguous else like

    def ascontiguousarray(self, array: Any, dtype: Any = None) -> np.ndarray:
        made = np.ascontiguousarray(array, dtype)
        return made if made is array or made.size == 0 else self.memory.copy(made)


def with_other_values(x: np.ndarray, rng: Any) -> np.ndarray:
    if x.dtype.kind in "iu" and x.size:
        least, most = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
        np.put(x, rng.integers(x.size), rng.choice(np.array([least, most, 0, 1, x.size, most // 8], x.dtype)))
    elif x.dtype.kind == "f" and x.size:
        np.put(x, rng.integers(x.size), rng.choice([np.nan, np.inf, -np.inf, 1e30, 1e-40]))
    return x


def changed_array(x: np.ndarray, rng: Any, memory: Guarded) -> Any:
    """An array that differs from x in one way."""
    dim = int(rng.integers(x.ndim)) if x.ndim else 0
    way = rng.integers(13)
    with np.errstate(all="ignore"):
        if way == 0:
            return memory.copy(x.astype(rng.choice(DTYPES)))
        if way <= 2 and x.ndim:                   # longer or shorter along a dim
            size = list(x.shape)
            size[dim] = max(0, size[dim] + int(rng.choice([-1, 1, -size[dim], -size[dim] // 2, 8])))
            return memory.copy(np.resize(x, size))
        if way == 3 and x.ndim:
            return x[(slice(None),) * dim + (slice(None, None, int(rng.choice([2, -1]))),)]
        if way == 4:
            return x.T
        if way == 5:
            return np.broadcast_to(memory.copy(x.ravel()[:1]), x.shape) if x.size else x
        if way == 6:
            return memory.copy(x.reshape(-1)) if rng.random() < 0.5 else memory.copy(x)[None]
        if way == 7:
            raw = memory.empty(x.nbytes + 1, np.uint8)
            return raw[:x.nbytes].view(x.dtype).reshape(x.shape)          # not aligned, where it ends with the page
        if way == 8:
            x = memory.copy(x)
            x.flags.writeable = False
            return x
        if way == 9:
            return rng.choice(np.array([None, 1, "text"], object))
        if way == 10:
            return memory.copy(x.swapaxes(0, -1)) if x.ndim else x
        if way == 11:
            return memory.copy(x[..., None] if rng.random() < 0.5 else x[..., 0]) if x.ndim and x.shape[-1] else x
        return with_other_values(memory.copy(x), rng)


def changed(value: Any, rng: Any, memory: Guarded) -> Any:
    if isinstance(value, np.ndarray):
        return changed_array(value, rng, memory)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        field = rng.choice([f.name for f in dataclasses.fields(value)])
        return dataclasses.replace(value, **{field: changed(getattr(value, field), rng, memory)})
    if isinstance(value, tuple) and value:
        place = int(rng.integers(len(value)))
        items = [*value[:place], changed(value[place], rng, memory), *value[place + 1:]]
        if rng.random() < 0.2:
            items = items[:-1] if rng.random() < 0.5 else [*items, items[-1]]
            return tuple(items)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + int(rng.choice([-2, -1, 1, 2, 8]))
    return NUMBERS[rng.integers(len(NUMBERS))]


def placed(value: Any, memory: Guarded) -> Any:
    """The same with its arrays in guarded memory."""
    if isinstance(value, np.ndarray):
        order = np.argsort([-stride for stride in value.strides], kind="stable")
        return memory.copy(value.transpose(order)).transpose(np.argsort(order))
    return value


def cases() -> dict[str, tuple[Any, Any, tuple[str, ...]]]:
    """By name: what is called, what makes its arguments of (rng, dtype), its dtypes."""
    from kernel_examples import EXAMPLES

    import mpitrain.kernels
    from mpitrain.kernels import KERNELS, wire
    for module in pkgutil.iter_modules(mpitrain.kernels.__path__):
        importlib.import_module(f"mpitrain.kernels.{module.name}")
    found = {name: (kernel, EXAMPLES[name].arguments, EXAMPLES[name].dtypes) for name, kernel in KERNELS.items()}
    for form in ("bfloat16", "float16"):
        for what, kinds in WIRE.items():
            found[f"{what}_{form}"] = (getattr(wire.format_of(form), what), lambda rng, dtype, kinds=kinds: tuple(
                np.ones(37, np.float32 if kind == "f" else np.uint16) for kind in kinds), ("float32",))
    found |= {name: (KERNELS[kernel], make, ("float32", "float64")) for name, (kernel, make) in others().items()}
    return found


def others() -> dict[str, tuple[str, Any]]:
    """Calls that other loops do than those of the examples: the kernel, and what makes its arguments."""
    from kernel_examples import normal, of_shapes

    from mpitrain.kernels.convolution import Window
    three, one, large = Window((3, 3), padding=(1, 1)), Window((1, 1)), (2, 16, 6, 7)
    made = {
        "convolve_3x3": ("convolve", of_shapes(large, (16, 16, 3, 3), (16,), then=(three, 1))),
        "convolve_adjoint_3x3": ("convolve_adjoint", of_shapes(large, (16, 16, 3, 3), (16,), then=(three, 1, (6, 7)))),
        "kernel_gradient_3x3": ("kernel_gradient", of_shapes(large, large, then=(three, 1, None, "y"))),
        "convolve_1x1": ("convolve", of_shapes((21, 6, 3, 2), (9, 6, 1, 1), (9,), then=(one, 1))),
        "convolve_adjoint_1x1": ("convolve_adjoint", of_shapes((21, 9, 3, 2), (9, 6, 1, 1), (6,), then=(one, 1, (3, 2)))),
        "batch_norm_hardswish": ("batch_norm", of_shapes((9, 70, 6), (70,), (70,), then=(None, 1e-5, 3))),
        "batch_norm_silu": ("batch_norm", of_shapes((9, 70, 6), (70,), (70,), then=(None, 1e-5, 4)))}
    def backward(shape: tuple[int, ...], number: int) -> Any:
        return lambda rng, dtype: (*normal(rng, dtype, shape, shape), None, *normal(rng, dtype, *3 * [shape[1:2]]),
                                   np.ones(shape[1]), number, True)
    return {**{name: (kernel, example.arguments) for name, (kernel, example) in made.items()},
            "batch_norm_gradients_relu6": ("batch_norm_gradients", backward((9, 70, 6), 2)),
            "batch_norm_gradients_silu": ("batch_norm_gradients", backward((9, 70, 6), 4)),
            "batch_norm_gradients_silu_large": ("batch_norm_gradients", backward((3, 4, 90), 4))}


def compile_loops(known: dict[str, tuple[Any, Any, tuple[str, ...]]]) -> None:
    """Calls everything once for each dtype: Numba compiles with the NumPy that there is."""
    for run, make, dtypes in known.values():
        for dtype in dtypes:
            run(*make(np.random.default_rng(0), np.dtype(dtype)))


def child(first: int, calls: int, seed: int, names: list[str]) -> None:
    """Says the number of each call before it is made, and then "r" for a result or "e" for an exception."""
    from mpitrain.kernels import library
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    memory, known = Guarded(), cases()
    names = names or sorted(known)
    compile_loops({name: known[name] for name in names})
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    library.Scratch.room = lambda self, nbytes: memory.empty(nbytes, np.uint8, library.LINE)      # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("mpitrain.kernels.") and hasattr(module, "np"):
            module.np = Numpy(memory)             # type: ignore[attr-defined]
    for number in range(first, calls):
        sys.stdout.buffer.write(struct.pack("<q", number))
        sys.stdout.buffer.flush()
        signal.alarm(LONGEST_S)                   # its default action is to end the process
        rng = np.random.default_rng((seed, number))
        memory.begin(ends=bool(rng.random() < 0.8))
        run, make, dtypes = known[names[number % len(names)]]
        arguments = [placed(x, memory) for x in make(rng, np.dtype(rng.choice(list(dtypes))))]
        for _ in range(rng.integers(5)):
            place = int(rng.integers(len(arguments)))
            try:
                arguments[place] = changed(arguments[place], rng, memory)
            except Exception:
                continue                          # no such change of this value
        answer = b"r"
        try:
            with np.errstate(all="ignore"):
                run(*arguments)
        except Exception:
            answer = b"e"
        if not memory.is_whole():
            sys.exit(CHANGED)
        sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def fuzz(calls: int, seed: int, names: list[str], kind: str) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """(how many calls gave a result and how many raised, (number, exit status) of those that ended the process)."""
    counts, deaths, first = {"r": 0, "e": 0}, [], 0
    while first < calls:
        command = [sys.executable, __file__, "--child", first, "--calls", calls, "--seed", seed, "--kernels", *names]
        process = subprocess.run([str(word) for word in command], env=os.environ | {"MPITRAIN_KERNELS": kind},
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        said, status = process.stdout, process.returncode
        whole, rest = divmod(len(said), 9)
        counts["r"] += said[8::9].count(b"r")
        counts["e"] += said[8::9].count(b"e")
        if status == 0 and not rest:
            break
        if not said:
            raise RuntimeError(f"the child ended with {status} before its first call")
        number = first + whole
        deaths.append((number, status))
        first = number + 1
    return counts, deaths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=["c", "numba", "numpy"], default="c")
    parser.add_argument("--kernels", nargs="*", default=[])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.calls, arguments.seed, arguments.kernels)
        return 0
    began, known = time.perf_counter(), arguments.kernels or sorted(cases())
    counts, deaths = fuzz(arguments.calls, arguments.seed, arguments.kernels, arguments.kind)
    for number, status in deaths:
        print(f"{known[number % len(known)]}: call {number} of seed {arguments.seed} ended with {status}")
    print(f"{arguments.calls} calls of {len(known)} functions in {arguments.kind} in {time.perf_counter() - began:.0f} s: "
          f"{counts['r']} results, {counts['e']} exceptions, {len(deaths)} deaths")
    return bool(deaths)


if __name__ == "__main__":
    sys.exit(main())
