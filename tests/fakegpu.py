"""A stand-in for CuPy that needs no GPU: arrays that refuse host arrays and NumPy's own functions.

    from fakegpu import counted, put, xp
    y = ops.relu(put(np.ones(3)))          # a DeviceArray; an `np.zeros` inside the op would raise TypeError
    with counted() as counts:              # launches, syncs, bytes up and down
        ops.relu(y)

Like CuPy: `xp.asarray` is the one way in and `get()` the one way out; a full reduction gives a 0-d array, not a scalar;
numbers may be mixed in; functions and methods take what those of CuPy take (`cupy_signatures`). Kernels of native/device run on
it as on a GPU, on the CPU (`device_on_host`). Unlike CuPy it computes on the host, so it says nothing about speed; and memory of
`xp.empty` is NaN, or a large integer.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import device_graphs
import device_races
import fakecuda
import numpy as np
import pytest
from cupy_signatures import FILE
from device_counts import SYNCS, Counts, counted, launches_of, note
from device_on_host import OnHost

from mpitrain.backend import namespace
from mpitrain.backend.namespace import MODULES
from mpitrain.backend.runtime import RUNTIMES

__all__ = ["DEVICES", "Counts", "DeviceArray", "counted", "open_device", "put", "runtime", "xp"]
TAKEN = json.loads(FILE.read_text())
IN_PLACE = frozenset(("copyto", "fill", "add.at", "subtract.at", "maximum.at", "minimum.at", "put"))


class DeviceArray:
    """An array whose memory only the module `xp` may touch."""

    __hash__ = None

    def __init__(self, memory: np.ndarray):
        self._memory = memory
        root = memory
        while isinstance(root.base, np.ndarray):
            root = root.base
        self.base = None if root is memory else _owner(root)      # as CuPy's views keep the array that has the memory
        if root is memory:
            OWNERS[id(memory)] = self
            fakecuda.pool_here().hold(memory, self)

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        note(down=self._memory.nbytes, sync="get" if blocking else None)
        if out is None or blocking:
            device_graphs.forbidden("get")
        stream = stream or fakecuda.get_current_stream()
        device_races.touch(stream, "a copy to the host", [self._memory], [] if out is None else [out])
        if blocking:
            device_races.host_waits(device_races.recorded(stream))
        if out is None:
            return self._memory.copy()
        copy = partial(np.copyto, out, self._memory)
        device_graphs.in_place(copy) if blocking else fakecuda.copy_later(copy, stream)
        return out

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        note(up=values.nbytes)
        device_races.touch(stream or fakecuda.get_current_stream(), "a copy from the host", [values], [self._memory])
        device_graphs.in_place(partial(np.copyto, self._memory, values))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a device array was handed to NumPy; use .get() for a copy on the host")

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"numpy.{ufunc.__name__} or a NumPy array met a device array; compute with xp")

    def __array_function__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a device array; use xp.{function.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            return SimpleNamespace(ptr=self._memory.ctypes.data)
        if name.startswith("__") or name == "ctypes":
            raise AttributeError(f"a device array has no {name}")
        found = getattr(self._memory, name)
        if name in ("T", "mT", "real", "imag"):
            return _wrap(found)
        if not callable(found):
            return _wrap(found) if isinstance(found, np.ndarray) else found
        if name not in TAKEN["methods"]:
            raise AttributeError(f"CuPy's arrays have no {name}")
        return _Function(found, name, TAKEN["methods"][name], self)

    def __getitem__(self, index: Any) -> Any:
        inside = _unwrap(index)
        _note_index(inside, "getitem")
        return _wrap(device_graphs.made(partial(self._memory.__getitem__, inside), _poisoned, [self._memory]))

    def __setitem__(self, index: Any, value: Any) -> None:
        inside = _unwrap(index)
        _note_index(inside, "setitem", writes=True)
        values = _unwrap(value)
        if device_races.watching():
            part = self._memory[inside]
            _touch("setitem", [values], [part if part.base is not None else self._memory])
        device_graphs.in_place(partial(self._memory.__setitem__, inside, values))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self._memory)

    def __bool__(self) -> bool:
        return bool(self._read("bool"))

    def __int__(self) -> int:
        return int(self._read("int"))

    def __float__(self) -> float:
        return float(self._read("float"))

    def __index__(self) -> int:
        return int(self._read("index"))

    def item(self) -> Any:
        return self._read("item").item()

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def _read(self, how: str) -> np.ndarray:
        device_graphs.forbidden(how)
        note(down=self._memory.nbytes, sync=how)
        return self._memory

    def __repr__(self) -> str:
        return f"device {self._memory!r}"


OWNERS: weakref.WeakValueDictionary[int, DeviceArray] = weakref.WeakValueDictionary()      # by the id of their memory


def launches_nothing(result: Any, given: list[Any]) -> bool:
    """Whether a result is a view of what was given."""
    return isinstance(result, np.ndarray) and any(isinstance(x, np.ndarray) and np.may_share_memory(result, x) for x in given)


def _touch(name: str, reads: list[Any], writes: list[Any]) -> None:
    """Tells who watches for races what the current stream is asked for."""
    device_races.touch(fakecuda.get_current_stream(), name, reads, writes)


def _owner(memory: np.ndarray) -> DeviceArray:
    """The one array that owns this memory, which has no base."""
    found = OWNERS.get(id(memory))
    return DeviceArray(memory) if found is None else found


def _note_index(index: Any, name: str, writes: bool = False) -> None:
    """A slice is a view; index arrays are read by a kernel; a mask's True places are counted first, which the host waits for."""
    parts = index if isinstance(index, tuple) else (index,)
    arrays = [part for part in parts if isinstance(part, np.ndarray) and part.ndim]
    if any(part.dtype == bool for part in arrays):
        device_graphs.forbidden(f"{name} of a mask")
        note(f"{name} of a mask", 3, sync=f"{name} of a mask")
    elif arrays or any(isinstance(part, list) for part in parts):
        note(f"{name} of indices")
    elif writes:
        note(name)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: DeviceArray, *others: Any) -> Any:
        inside = [_unwrap(other) for other in others]
        work = partial(getattr(self._memory, name), *inside)
        if name.startswith("__i") and name != "__invert__":
            _touch(name, inside, [self._memory])
            device_graphs.in_place(work)
            note(name.strip("_"), launches_of(name, self._memory, [self._memory, *inside]))
            return self
        result = device_graphs.made(work, _poisoned, [])
        _touch(name, [self._memory, *inside], [result])
        if result is not NotImplemented:
            note(name.strip("_"), launches_of(name, result, [self._memory, *inside]))
        return result if result is NotImplemented else _wrap(result)
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    for _form in (_name, f"r{_name}", f"i{_name}"):
        setattr(DeviceArray, f"__{_form}__", _operator(f"__{_form}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))


def _unwrap(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return value._memory
    if isinstance(value, np.ndarray):
        raise TypeError("a NumPy array was mixed with device arrays; xp.asarray moves it")
    if isinstance(value, list | tuple):
        return type(value)(_unwrap(v) for v in value)
    return value


def _wrap(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return DeviceArray(value) if isinstance(value.base, np.ndarray) else _owner(value)
    if isinstance(value, np.generic):
        return DeviceArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return list(map(_wrap, value)) if isinstance(value, list) else tuple(map(_wrap, value))   # of linalg's named tuples, too
    return value


class _Function:
    """A function, a method of `owner`, or a function with methods such as xp.add.at; called as CuPy's may be called."""

    def __init__(self, function: Any, name: str, taken: Any, owner: DeviceArray | None = None):
        self._function, self._name, self._taken, self._owner = function, name, taken, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._taken is not None:
            self._check(args, kwargs)
        inside = _unwrap(args)
        work = partial(self._function, *inside, **{key: _unwrap(value) for key, value in kwargs.items()})
        given = list(inside) if self._owner is None else [self._owner._memory, *inside]
        out = kwargs.get("out")
        if self._name in SYNCS:
            device_graphs.forbidden(self._name)
        if out is not None or self._name in IN_PLACE:
            _touch(self._name, given, [given[0] if out is None else out._memory])
            device_graphs.in_place(work)
            note(self._name, launches_of(self._name, given[0] if out is None else out._memory, given))
            return out
        result = device_graphs.made(work, _poisoned, [x for x in given if isinstance(x, np.ndarray)])
        if device_races.watching() and not launches_nothing(result, given):
            _touch(self._name, given, [result])
        note(self._name, launches_of(self._name, result, given))
        return _wrap(result)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        most, keywords = self._taken["positional"], self._taken["keywords"]
        if most is not None and len(args) > most:
            raise TypeError(f"CuPy's {self._name} takes {most} positional arguments, and got {len(args)}")
        for key in kwargs:
            if keywords is not None and key not in keywords:
                raise TypeError(f"CuPy's {self._name} has no argument {key}; it takes {', '.join(keywords)}")

    def __getattr__(self, name: str) -> Any:
        methods = (self._taken or {}).get("methods")
        if methods is not None and name in ("at", "reduce", "accumulate") and name not in methods:
            raise NotImplementedError(f"CuPy's {self._name}.{name} is not supported yet")
        return _Function(getattr(self._function, name), f"{self._name}.{name}", None)


class _Cuda:
    """`fakecuda`, but for what CuPy has elsewhere, or not at all."""

    def __getattr__(self, name: str) -> Any:
        if name not in TAKEN["cuda"][""] and name != "nccl":      # which is a package of its own
            raise AttributeError(f"cupy.cuda has no {name}")
        return getattr(fakecuda, name)


class _Module:
    __name__ = "fakegpu"
    ndarray = DeviceArray
    cuda = _Cuda()

    def __init__(self, inside: Any = np, prefix: str = ""):
        self._inside, self._prefix = inside, prefix

    @staticmethod
    def asarray(value: Any, dtype: Any = None, order: str | None = None) -> DeviceArray:
        if isinstance(value, DeviceArray):
            return value if dtype is None or value.dtype == dtype else value.astype(dtype)
        if isinstance(value, list | tuple):
            value = _unwrap(value)
        made = np.array(value, dtype=dtype)
        fakecuda.alloc_pinned_memory(made.nbytes)             # as CuPy does, in a capture as well, and uses it again soon
        note(up=made.nbytes)
        return DeviceArray(_poisoned(made) if device_graphs.capturing() else made)

    array = asarray

    @staticmethod
    def get_default_pinned_memory_pool() -> Any:
        return fakecuda.pinned

    @staticmethod
    def get_default_memory_pool() -> fakecuda.MemoryPool:
        return fakecuda.default_pool

    @staticmethod
    def empty(shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
        return DeviceArray(_poisoned(fakecuda.memory(shape, dtype)))

    @staticmethod
    def empty_like(prototype: DeviceArray, dtype: Any = None, order: str = "K", subok: Any = None,
                   shape: Any = None) -> DeviceArray:
        return DeviceArray(_poisoned(np.empty_like(prototype._memory, dtype, order=order, shape=shape)))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        if isinstance(found, ModuleType):         # xp.fft.rfft
            return _Module(found, f"{name}.")
        if not callable(found) or isinstance(found, type):
            return found
        if self._prefix + name not in TAKEN["functions"]:
            raise AttributeError(f"CuPy has no {self._prefix}{name}")
        return _Function(found, self._prefix + name, TAKEN["functions"][self._prefix + name])


def _poisoned(memory: np.ndarray) -> np.ndarray:
    """Its bytes are such that floats are NaN and integers 0x7fff..., which tells who reads what nobody has written."""
    dims = sorted(range(memory.ndim), key=lambda dim: -memory.strides[dim])
    numbers = memory.transpose(dims).reshape(-1).view(f"u{memory.itemsize}") if memory.itemsize in (1, 2, 4, 8) else None
    if numbers is not None and memory.dtype.kind != "b":
        numbers[...] = (1 << 8 * memory.itemsize - 1) - 1
    return memory


xp = _Module()
put = xp.asarray
runtime = OnHost()
MODULES[DeviceArray] = xp
RUNTIMES["fakegpu"] = lambda: runtime


def instead_of_cupy() -> None:
    """From now on `train.device = "gpu"` of this process is the stand-in."""
    namespace._cupy = lambda: (xp, "")


# Tests that take `device` run on the stand-in everywhere and on real CuPy where `make test-gpu` finds one.
DEVICES = ["stand-in", pytest.param("cupy", marks=pytest.mark.gpu)]


def open_device(name: str) -> tuple[Any, Callable[[Any], Any], type]:
    """(array module, function that moves a host array there, type of its arrays)."""
    if name == "stand-in":
        return xp, put, DeviceArray
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("there is no GPU")
    return cupy, cupy.asarray, cupy.ndarray
