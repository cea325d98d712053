"""Calls C functions of ``native/`` with arrays: the version for the arrays' dtype, and nothing that C would misread.

C sees addresses. So each function is bound with a signature (`door`), and what it is called with is checked against that each
time, in call.c: arrays for dtype, gaps, alignment and, where the integers of the call say it, size.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NoReturn, TypeAlias

import numpy as np

from mpitrain.backend import Array, native
from mpitrain.errors import ShapeError
from mpitrain.kernels.door import DTYPES, Door, Slot, slots_of

LINE = 64

CFunction: TypeAlias = Callable[..., None]
MOST_INTEGERS, MOST_DOUBLES = 16, 4                # call.c's limits; arrays count as integers

VERSIONS = {"f": "float32", "d": "float64"}


class CSlot(ctypes.Structure):
    """call.c's Slot."""

    _fields_ = [("kind", ctypes.c_char), ("optional", ctypes.c_char), ("written", ctypes.c_char), ("size", ctypes.c_char_p),
                ("dtypes", ctypes.c_char_p)]


class Known(ctypes.Structure):
    """call.c's Known: a dtype object, and how it is written."""

    _fields_ = [("dtype", ctypes.c_void_p), ("letter", ctypes.c_char)]


class Entry(ctypes.Structure):
    """call.c's Entry."""

    _fields_ = [("float32", ctypes.c_void_p), ("float64", ctypes.c_void_p), ("slots", ctypes.POINTER(CSlot)),
                ("count", ctypes.c_int64), ("answers", ctypes.c_int64), ("known", ctypes.POINTER(Known)),
                ("dtype", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def bind(library: str, function: str, signature: str, answers: bool = False) -> Callable[..., None] | None:
    """A function of ``native/<library>.c`` as a callable that checks what it is called with; None without a compiler.

    `signature` is written as `slots_of` says. With an X, all of these have one dtype, and ``<function>_float32`` or
    ``<function>_float64`` is called; otherwise ``<function>``. Arrays must be C-contiguous and aligned. A function that `answers`
    returns 1 where memory ran out, which raises MemoryError here, and 2 where an index lies outside of what it counts:
    IndexError. The others return nothing. What the signature forbids is a TypeError or a ValueError.
    """
    slots = slots_of(signature)
    loaded = native.load(library)
    if loaded is None:
        return None
    names = [f"{function}_{name}" for name in VERSIONS.values()] if any(slot.kind == "X" for slot in slots) else [function] * 2
    versions = [getattr(loaded, name) for name in names]
    make, doubles = _builtin(), sum(slot.kind == "d" for slot in slots)
    if make is not None and len(slots) - doubles <= MOST_INTEGERS and doubles <= MOST_DOUBLES:
        table = (CSlot * len(slots))(*[CSlot(slot.kind.encode(), bytes([slot.optional]), bytes([slot.written]),
                                             slot.size.encode(), DTYPES.get(slot.kind, "").encode()) for slot in slots])
        entry = Entry(*[ctypes.cast(version, ctypes.c_void_p).value for version in versions], table, len(slots), answers,
                      _known(), id(_DTYPE), function.encode())
        _entries.append(entry)
        return make(ctypes.addressof(entry))
    return _by_ctypes(versions, function, slots, answers)


class Host:
    """A kernel's body, called as ``body(function, *arguments)``, and what the function is. Itself what `Kernel` takes as `host`:
    a factory, with the function of C; None where `bind` finds none.
    """

    def __init__(self, body: Callable[..., Any], library: str, function: str, signature: str, answers: bool):
        self.body, self.library, self.function, self.signature, self.answers = body, library, function, signature, answers

    def __call__(self) -> Callable[..., Any] | None:
        found = bind(self.library, self.function, self.signature, self.answers)
        return None if found is None else partial(self.body, found)

    def loop(self, module: str) -> Callable[[], Callable[..., Any]]:
        """What `Kernel` takes as `numba`: the same body, with the loop of Numba of that name and signature in
        ``kernels/loops/<module>.py``.
        """
        def factory() -> Callable[..., Any]:
            function, typed = self._of(module), import_module("mpitrain.kernels.loops.typed")
            return partial(self.body, typed.loop(self.signature, self.answers, self.function)(function))
        return factory

    def composed(self, module: str) -> Callable[[], Callable[..., Any]]:
        """The same, where that function is one of arrays, of NumPy and of loops: it is called through the same door."""
        def factory() -> Callable[..., Any]:
            function, door = self._of(module), Door(self.function, slots_of(self.signature))
            return partial(self.body, lambda *arguments: function(*door(arguments)[1]))
        return factory

    def _of(self, module: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(f"mpitrain.kernels.loops.{module}"), self.function)
        return found


def host(library: str, function: str, signature: str, answers: bool = False) -> Callable[[Callable[..., Any]], Host]:
    """Makes a `Host` of ``body(function, *arguments)``."""
    return lambda body: Host(body, library, function, signature, answers)


def failed(function: str, code: int) -> NoReturn:
    """Raises what a function that answers says."""
    if code == 1:
        raise MemoryError(f"{function}: no memory for packed copies")
    raise IndexError(f"{function}: an index lies outside of what it counts")


def misfit(kernel: str, *arrays: Any) -> NoReturn:
    """What the body of a kernel says of arrays that no signature can tell apart from right ones."""
    shapes = ", ".join(str(getattr(array, "shape", array)) for array in arrays)
    raise ShapeError(f"{kernel}: arrays of shapes {shapes} do not fit each other")


_entries: list[Entry] = []                        # the builtins point to them
_DTYPE = "dtype"


@cache
def _known() -> Any:
    """The dtype objects that nearly all arrays have, each with its letter; an array may have another one that is equal."""
    letters = "fdlLiI?BHqQ"
    return (Known * (len(letters) + 1))(*[Known(id(np.dtype(letter)), letter.encode()) for letter in letters])


@cache
def _builtin() -> Callable[[int], Callable[..., None]] | None:
    """Makes the builtin that call.c is, for the address of an entry; None on machines where it cannot be had."""
    library = native.load("call")
    return native.builtin(library.call, native.FASTCALL) if library is not None and library.can_call() else None


def _by_ctypes(versions: Sequence[Any], function: str, slots: tuple[Slot, ...], answers: bool) -> Callable[..., None]:
    """What call.c does, where that cannot be had."""
    for version in versions:
        version.argtypes = [{"i": ctypes.c_int64, "d": ctypes.c_double}.get(slot.kind, ctypes.c_void_p) for slot in slots]
        version.restype = ctypes.c_int if answers else None
    door = Door(function, slots)

    def call(*arguments: Any) -> None:
        chosen, given = door(arguments)           # ctypes would take any integer for an address
        code = versions[chosen == "d"](*[x.ctypes.data if isinstance(x, np.ndarray) else x for x in given])
        if answers and code:
            failed(function, code)
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

