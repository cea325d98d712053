"""A kernel: a plain array expression that defines it, and compiled versions that must equal it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend.cache import one_at_a_time, prepare_numba
from mpitrain.backend.namespace import array_module
from mpitrain.backend.native import VARIABLE, load, wanted
from mpitrain.backend.runtime import runtime
from mpitrain.errors import ConfigError
from mpitrain.kernels.half import in_single

Function = Callable[..., Any]
Factory = Callable[[], Function | None]
FORMATS = frozenset(("float32", "float64", "bfloat16", "float16"))     # what device versions take
SOUND = "-enable-scoped-noalias=false"       # to LLVM: see obey_no_scopes
KERNELS: dict[str, Kernel] = {}              # tests run each compiled version against its reference


class Kernel:
    """`reference` works on any arrays and defines the result; on arrays of NumPy a compiled version is faster: `c` or `numba`.

    Both are factories, called at the first use, so that importing compiles nothing. C's answers None where its version cannot be
    had (no compiler); then Numba's serves, and where that is not there either (or MPITRAIN_KERNELS=numpy), the reference. On
    arrays of a device it is the version of that name in ``kernels/device``, where there is one for their format. The first
    argument decides where the kernel runs.
    """

    formats = FORMATS                            # of the first argument, for which the device version is taken

    def __init__(self, name: str, reference: Function, host: Factory = lambda: None, numba: Factory = lambda: None):
        self.name, self.reference, self.on_host, self.numba = name, reference, host, numba
        self._on_device: dict[Any, Function] = {}
        self.host: Factory = cache(lambda: host() or (numba() if has_numba() else None))
        assert name not in KERNELS, f"kernel {name!r} defined twice"
        KERNELS[name] = self

    def __deepcopy__(self, memo: Any) -> Kernel:
        """There is one of each name; and modules, by which device versions are known, have no copies."""
        return self

    def __call__(self, *arguments: Any) -> Any:
        first = arguments[0]
        on_host = type(first) is np.ndarray or (module := array_module(first)) is np
        version = self.host() if on_host else self.device(first, module)
        return (version or self.reference)(*arguments)

    def device(self, first: Any, module: Any) -> Function | None:
        """The version for arrays of a device, of which `first` is one; None where the reference serves."""
        found = self._on_device.get(module)
        if found is None:
            from mpitrain.kernels.device import version_of
            usable = runtime(module.__name__) is not None
            found = self._on_device[module] = (version_of(self.name) if usable else None) or in_single(self.reference)
        return found if getattr(first, "dtype", None) is not None and first.dtype.name in self.formats else None


@cache
def has_numba() -> bool:
    """Whether Numba's loops serve where C's do not: it is installed, and MPITRAIN_KERNELS is not "numpy".

    ConfigError where it is not installed, and MPITRAIN_KERNELS=numba wants nothing else.
    """
    if wanted() == "numpy":
        return False
    found = find_spec("numba") is not None
    if wanted() == "numba" and not found:
        raise ConfigError(f"{VARIABLE}=numba, but Numba is not installed; pip install numba, or unset {VARIABLE}")
    return found


@cache
def kind() -> str:
    """What kernels run as here: "c", "numba" or "numpy". Bits differ between them. Loads a library, or tries to."""
    return "c" if load("rows") is not None else "numba" if has_numba() else "numpy"


def compiled(signature: Any) -> Callable[[Function], Function]:
    """Numba's njit with our settings: cached on disk, no interpreter lock, no fast-math (it changes bits).

    `signature` (a list for several dtypes) is explicit: a Python literal in a loop promotes float32 to float64 when types are
    left to inference. So all is compiled here, by one process at a time; the next ones find it on the disk. Where the cache
    folder takes no file each process compiles for itself, in memory.
    """
    prepare()
    import numba
    obey_no_scopes()
    settings: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def decorate(function: Function) -> Function:
        made: Function
        try:
            with one_at_a_time(f"numba-{function.__module__}.{function.__name__}"):
                made = numba.njit(signature, cache=True, **settings)(function)
        except (OSError, RuntimeError, ImportError):
            # Saving fails; "no locator available" where its folder cannot be made; or the cache has what was made when the file
            # of the function was imported under a name that nobody knows here.
            made = numba.njit(signature, **settings)(function)
        return made
    return decorate


@cache
def obey_no_scopes() -> None:
    """Has LLVM pass over what its vectoriser notes of arrays that do not overlap, in all that this process compiles from now on.

    The vectoriser guards `lanes[i] += lanes[i + step]` with a check that both ranges are apart, and marks the accesses so. That
    holds for one `step`. Numba optimises a function by itself and again in each that calls it; there the loop over steps is
    unrolled, marks and all, and LLVM (22, llvmlite 0.50) takes what one step writes for apart from what the next one reads: it
    reads the old value. The sums of row_norm in float64 were wrong so where vectors are of 4 (AVX2). The process that compiles
    calls its first copy of the inner function, which is right; one that loads the object from the cache calls the copy within,
    which was not. Without the marks neither can be. It costs row_norm some 7 % (timed on a busy machine), softmax nothing.
    """
    from llvmlite import binding
    binding.set_option("mpitrain", SOUND)


@cache
def prepare() -> None:
    """Numba's cache is that of the present content of ``kernels/loops``; to be called before Numba is imported."""
    found = hashlib.sha256(SOUND.encode())               # What was compiled without it is not loaded.
    for path in sorted((Path(__file__).parent / "loops").glob("*.py")):
        found.update(path.read_bytes())
    prepare_numba(found.hexdigest()[:12])
