"""Arrays and where they live: NumPy on the host, CuPy on a GPU, one code path for both.

Everything above this package is written with `xp = array_module(x)`; nothing above it names NumPy or CuPy to choose
between them. A third array module (the tests' stand-in for a GPU) joins through `MODULES`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend.downloads import Downloads, Read
from mpitrain.errors import ConfigError, text_of

Array: TypeAlias = Any                       # numpy.ndarray or cupy.ndarray; the one alias for both
MODULES: dict[type, Any] = {np.ndarray: np}  # the module for each type of arrays


def array_module(*arrays: Any) -> Any:
    """numpy or cupy: the module whose functions take these arrays. Scalars and lists count as host data."""
    for array in arrays:
        found = MODULES.get(type(array))
        if found is None and type(array).__module__.partition(".")[0] == "cupy":
            found = MODULES[type(array)] = sys.modules["cupy"]
        if found is not None:
            return found
    return np


def is_array(value: Any) -> bool:
    """True for arrays of any registered module (not for NumPy scalars, lists or numbers)."""
    return type(value) in MODULES or array_module(value) is not np


def asnumpy(array: Any) -> np.ndarray[Any, Any]:
    """The values on the host; the array itself where it is a NumPy array already."""
    if isinstance(array, np.ndarray):
        return array
    return array.get() if hasattr(array, "get") else np.asarray(array)


def constant(xp: Any, values: Any) -> Array:
    """`values` as an array of `xp`, not to be written to. A device gets each content once, so a step brings none of them up; what
    it has already is taken as it is."""
    if xp is not np and array_module(values) is xp:
        return values
    values = np.asarray(values)
    return values if xp is np else _brought(xp.__name__, values.dtype, values.shape, values.tobytes())


@cache
def _brought(module: str, dtype: Any, shape: tuple[int, ...], content: bytes) -> Array:
    """For good, since a captured graph may read it. The dtype itself, since bfloat16 has a `str` of nothing but its bytes."""
    xp = next(found for found in MODULES.values() if found.__name__ == module)
    return xp.asarray(np.frombuffer(content, dtype).reshape(shape))


def overwrite(target: Array, values: Any) -> None:
    """Copies values into an array, wherever each of them lives."""
    xp = array_module(target)
    target[...] = asnumpy(values) if xp is np else xp.asarray(values)


@dataclass(frozen=True)
class Device:
    """A place arrays live: `name` is "cpu" or "gpu", `xp` its array module."""

    name: str
    xp: Any
    downloads: Downloads = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "downloads", Downloads(self.xp))

    @property
    def address(self) -> str:
        """Where this process's GPU is on the bus, "0000:17:00.0"; "" on the host."""
        return str(self.xp.cuda.Device().pci_bus_id) if self.name == "gpu" else ""

    def put(self, array: Any) -> Array:
        """`array` on this device; no copy where it is there already."""
        if array_module(array) is self.xp and is_array(array):
            return array
        return self.xp.asarray(asnumpy(array))

    def read_later(self, array: Array, room: int | None = None) -> Read:
        """Begins to copy a small array to the host, and returns what waits for it and gives it: nothing waits until then. For
        `room`, see `Downloads.begin`."""
        return self.downloads.begin(array, room)

    def synchronize(self) -> None:
        """Returns when everything queued on the device has finished (at once on the host)."""
        if self.name == "gpu":
            self.xp.cuda.get_current_stream().synchronize()


CPU = Device("cpu", np)


def select_device(name: str, local_rank: int = 0) -> Device:
    """The device called "cpu", "gpu" or "auto" (a GPU where there is one); GPUs are shared out by `local_rank`.

    Raises ConfigError where "gpu" is asked for and CuPy or a GPU is missing.
    """
    if name == "cpu":
        return CPU
    if name not in ("gpu", "auto"):
        raise ConfigError(f'train.device is "cpu", "gpu" or "auto", not "{name}"')
    found, why = _cupy()
    if found is None:
        if name == "auto":
            return CPU
        raise ConfigError(f'train.device = "gpu", but {why}; install mpitrain[cuda12] or [cuda13], or use "cpu"')
    found.cuda.Device(local_rank % found.cuda.runtime.getDeviceCount()).use()
    return Device("gpu", found)


def _cupy() -> tuple[Any | None, str]:
    """CuPy where it can be used, and else the reason why not."""
    import warnings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")          # CuPy warns at import about optional libraries it lacks.
            import cupy
    except ImportError as error:
        return None, f"CuPy cannot be imported ({text_of(error)})"
    if not cupy.cuda.is_available():                 # getDeviceCount would raise without a driver.
        return None, "CuPy finds no GPU"
    return cupy, ""
