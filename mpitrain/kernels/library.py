"""Calls C functions of ``native/`` with arrays: the version for the arrays' dtype, memory checked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from mpitrain.backend import Array, native

LINE = 64
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}

CFunction: TypeAlias = Callable[..., None]
Result = TypeVar("Result")
MOST_INTEGERS, MOST_DOUBLES = 16, 4                # call.c's limits; arrays count as integers


class Entry(ctypes.Structure):
    """call.c's Entry."""

    _fields_ = [("float32", ctypes.c_void_p), ("float64", ctypes.c_void_p), ("signature", ctypes.c_char_p),
                ("allocates", ctypes.c_int64)]


def bind(library: str, function: str, signature: str, allocates: bool = False) -> Callable[..., None] | None:
    """``<function>_float32`` and ``<function>_float64`` of ``native/<library>.c`` as one callable; None without them.

    `signature` has a letter for each argument: p array (or None: a null pointer), i integer, d double. The first
    argument's dtype chooses the version; of the other arrays nobody asks whether theirs is what C takes them for. Arrays must be
    C-contiguous and aligned: the C code sees their memory only, and may write to it where they are read-only. A function that
    `allocates` returns 1 where memory ran out, which raises MemoryError here; the others return nothing.
    """
    assert signature[0] == "p", f"{function}: the first argument is an array"
    loaded = native.load(library)
    if loaded is None:
        return None
    make, doubles = _builtin(), signature.count("d")
    if make is not None and len(signature) - doubles <= MOST_INTEGERS and doubles <= MOST_DOUBLES:
        addresses = [ctypes.cast(getattr(loaded, f"{function}_{name}"), ctypes.c_void_p).value for name in ("float32", "float64")]
        entry = Entry(*addresses, signature.encode(), allocates)
        _entries.append(entry)
        return make(ctypes.addressof(entry))
    return _by_ctypes(loaded, function, signature, allocates)


def host(library: str, function: str, signature: str, allocates: bool = False) -> Callable[
        [Callable[..., Result]], Callable[[], Callable[..., Result] | None]]:
    """Makes of ``body(c_function, *arguments)`` what `Kernel` takes as `host`: a factory, None where `bind` finds nothing."""
    def decorate(body: Callable[..., Result]) -> Callable[[], Callable[..., Result] | None]:
        def factory() -> Callable[..., Result] | None:
            found = bind(library, function, signature, allocates)
            return None if found is None else partial(body, found)
        return factory
    return decorate


_entries: list[Entry] = []                        # the builtins point to them


@cache
def _builtin() -> Callable[[int], Callable[..., None]] | None:
    """Makes the builtin that call.c is, for the address of an entry; None on machines where it cannot be had."""
    library = native.load("call")
    return native.builtin(library.call, native.FASTCALL) if library is not None and library.can_call() else None


def _by_ctypes(loaded: ctypes.CDLL, function: str, signature: str, allocates: bool) -> Callable[..., None]:
    result = ctypes.c_int if allocates else None
    versions = {np.dtype(dtype): of_arrays(getattr(loaded, f"{function}_{np.dtype(dtype).name}"), signature, result)
                for dtype in (np.float32, np.float64)}

    def call(*arguments: Any) -> None:
        dtype = getattr(arguments[0], "dtype", None)
        if dtype not in versions:
            raise TypeError("a C function wants an array of float32 or float64 first")
        if versions[dtype](*arguments):
            raise MemoryError(f"{function}: no memory for packed copies")
    return call


def of_arrays(function: Any, signature: str, result: Any = None) -> Callable[..., Any]:
    """One C function, through ctypes, that takes arrays or None where `signature` (see `bind`) says p."""
    function.argtypes, function.restype = [TYPES[letter] for letter in signature], result
    arrays = [place for place, letter in enumerate(signature) if letter == "p"]

    def call(*arguments: Any) -> Any:
        if len(arguments) != len(signature):      # ctypes would hand on what is too much
            raise TypeError("a C function was called with another number of arguments than it has")
        given = list(arguments)
        for place in arrays:
            if given[place] is not None:
                given[place] = _address(given[place])
        return function(*given)
    return call


def packed(array: Array | None) -> Array | None:
    """The array without gaps: itself, or a copy; None stays None."""
    return None if array is None else np.ascontiguousarray(array)


def same_shape(function: CFunction, first: Array, *others: Array) -> Array:
    """A result of the first array's shape and dtype, which `function` computes from (arrays, the result, the shape)."""
    first = np.ascontiguousarray(first)
    result = np.empty_like(first)
    function(first, *[np.ascontiguousarray(array) for array in others], result, *first.shape)
    return result


class Scratch(threading.local):
    """Working memory for C functions, kept for each thread while it lives: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> Array:
        """`nbytes` or more from a cache line on; the same memory as the last time, unless that was too small."""
        memory = self._memory
        if len(memory) < nbytes:
            raw = np.empty(nbytes + LINE, np.uint8)
            memory = self._memory = raw[-raw.ctypes.data % LINE:][:nbytes]
        return memory


_Memory = ctypes.c_char * 1
_memory_of: Callable[[Any], Any] = _Memory.from_buffer      # 1.6 us; `array.ctypes.data` takes 5.4, and a small op calls for six


def _address(array: Any) -> Any:
    """The address of an array without gaps, for C."""
    if not isinstance(array, np.ndarray):         # ctypes takes any integer for an address
        raise ValueError("a C function was handed an array with gaps, or no array")
    if not array.flags.aligned:
        raise ValueError("a C function was handed an array whose numbers are not aligned")
    try:
        return _memory_of(array)
    except (TypeError, ValueError):               # empty, read-only, or with gaps
        if not array.flags.c_contiguous:
            raise ValueError("a C function was handed an array with gaps") from None
        return array.ctypes.data
