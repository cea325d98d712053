"""A stand-in for CuPy that needs no GPU: arrays that refuse host arrays and NumPy's own functions.

    from fakegpu import xp, put
    y = ops.relu(put(np.ones(3)))          # a DeviceArray; an `np.zeros` inside the op would raise TypeError

Like CuPy: `xp.asarray` is the one way in and `get()` the one way out; a full reduction gives a 0-d array, not a scalar;
numbers may be mixed in. Kernels of native/device run on it as on a GPU, on the CPU (`device_on_host`). Unlike CuPy it computes on
the host, so it says nothing about speed or about missing functions; and memory of `xp.empty` is NaN, or a large integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from device_on_host import OnHost

from mpitrain.backend.namespace import MODULES
from mpitrain.backend.runtime import RUNTIMES


class DeviceArray:
    """An array whose memory only the module `xp` may touch."""

    __hash__ = None

    def __init__(self, memory: np.ndarray):
        self._memory = memory

    def get(self) -> np.ndarray:
        return self._memory.copy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a device array was handed to NumPy; use .get() for a copy on the host")

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"numpy.{ufunc.__name__} or a NumPy array met a device array; compute with xp")

    def __array_function__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a device array; use xp.{function.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("ctypes", "data", "base"):
            raise AttributeError(f"a device array has no {name}")
        found = getattr(self._memory, name)
        return _on_device(found) if callable(found) else _wrap(found)

    def __getitem__(self, index: Any) -> Any:
        return _wrap(self._memory[_unwrap(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._memory[_unwrap(index)] = _unwrap(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self._memory)

    def __bool__(self) -> bool:
        return bool(self._memory)

    def __int__(self) -> int:
        return int(self._memory)

    def __float__(self) -> float:
        return float(self._memory)

    def __index__(self) -> int:
        return int(self._memory)

    def __repr__(self) -> str:
        return f"device {self._memory!r}"


def _operator(name: str) -> Callable[..., Any]:
    def method(self: DeviceArray, *others: Any) -> Any:
        result = getattr(self._memory, name)(*(_unwrap(other) for other in others))
        if name.startswith("__i") and name != "__invert__":
            return self
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
        return DeviceArray(value)
    if isinstance(value, np.generic):
        return DeviceArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return list(map(_wrap, value)) if isinstance(value, list) else tuple(map(_wrap, value))   # of linalg's named tuples, too
    return value


class _on_device:                                 # noqa: N801  (a function with methods, such as xp.add.at)
    def __init__(self, function: Any):
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*_unwrap(args), **{key: _unwrap(value) for key, value in kwargs.items()})
        return kwargs["out"] if kwargs.get("out") is not None else _wrap(result)

    def __getattr__(self, name: str) -> Any:
        return _on_device(getattr(self._function, name))


class _Module:
    __name__ = "fakegpu"
    ndarray = DeviceArray

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> DeviceArray:
        if isinstance(value, DeviceArray):
            return value if dtype is None or value.dtype == dtype else value.astype(dtype)
        if isinstance(value, list | tuple):
            value = _unwrap(value)
        return DeviceArray(np.array(value, dtype=dtype))

    array = asarray

    @staticmethod
    def empty(shape: Any, dtype: Any = float) -> DeviceArray:
        return DeviceArray(_poisoned(np.empty(shape, dtype)))

    @staticmethod
    def empty_like(like: DeviceArray, dtype: Any = None) -> DeviceArray:
        return DeviceArray(_poisoned(np.empty_like(like._memory, dtype)))

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, ModuleType):         # xp.fft.rfft
            return _on_device(found)
        return _on_device(found) if callable(found) and not isinstance(found, type) else found


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
