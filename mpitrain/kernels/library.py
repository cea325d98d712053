"""Calls C functions of ``native/`` with arrays: the version for the arrays' dtype, and nothing that C would misread.

C sees addresses. So each function is bound with a signature, and what it is called with is checked against that each time,
in call.c: arrays for dtype, gaps, alignment and, where the integers of the call say it, size.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np

from mpitrain.backend import Array, native
from mpitrain.errors import ShapeError

LINE = 64

CFunction: TypeAlias = Callable[..., None]
Result = TypeVar("Result")
MOST_INTEGERS, MOST_DOUBLES = 16, 4                # call.c's limits; arrays count as integers

# The letters of arrays, with the dtypes that they stand for as NumPy writes them; X is the dtype that chooses the version.
DTYPES = {"X": "", "F": "f", "D": "d", "H": "H", "I": "i", "U": "I", "L": "lqLQ", "B": "B?", "M": ""}
VERSIONS = {"f": "float32", "d": "float64"}


class Slot(NamedTuple):
    """What a function takes in one place: an integer ("i"), a double ("d") or an array (a letter of DTYPES)."""

    kind: str
    optional: bool = False
    written: bool = False
    size: str = ""                                # in terms of integers: a is the first one; arrays count as integers


def slots_of(signature: str) -> tuple[Slot, ...]:
    """A signature taken apart; `bind` says how it is written."""
    found = [re.fullmatch(r"d|i([a-zA-Z])?|([XFDHIULBM])(\??)(!?)(?::([a-zA-Z0-9/+]+))?", word) for word in signature.split()]
    assert all(found), f"a signature says {signature!r}"
    words = [match for match in found if match is not None]
    integers = [match[1] for match in words if match[0] != "d"]
    place = {name: chr(ord("a") + i) for i, name in enumerate(integers) if name is not None}
    return tuple(Slot(match[2], match[3] == "?", match[4] == "!", "".join(place[c] if c.isalpha() else c for c in match[5] or ""))
                 if match[2] else Slot(match[0][0]) for match in words)


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

    `signature` has a word for each argument. ``d`` is a double, ``i`` an integer, ``in`` an integer that sizes call n. A capital
    is an array: X float32 or float64, F float32, D float64, H 16 bits, I int32, U uint32, L int64 or uint64, B bytes or
    booleans, M memory of any kind. After it, ``?`` says that None may stand there, ``!`` that C writes to it, and ``:mn`` that it
    has m n numbers or more (of M: bytes), where n may be written as a number; ``/8`` divides what stands before it, rounded up;
    ``+`` joins terms. Where no size is written, the body of the kernel must know it.

    With an X, all of these have one dtype, and ``<function>_float32`` or ``<function>_float64`` is called; otherwise
    ``<function>``. Arrays must be C-contiguous and aligned. A function that `answers` returns 1 where memory ran out, which
    raises MemoryError here, and 2 where an index lies outside of what it counts: IndexError. The others return nothing. What the
    signature forbids is a TypeError or a ValueError.
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


def host(library: str, function: str, signature: str, answers: bool = False) -> Callable[
        [Callable[..., Result]], Callable[[], Callable[..., Result] | None]]:
    """Makes of ``body(c_function, *arguments)`` what `Kernel` takes as `host`: a factory, None where `bind` finds nothing."""
    def decorate(body: Callable[..., Result]) -> Callable[[], Callable[..., Result] | None]:
        def factory() -> Callable[..., Result] | None:
            found = bind(library, function, signature, answers)
            return None if found is None else partial(body, found)
        return factory
    return decorate


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

    def call(*arguments: Any) -> None:
        chosen, given = _checked(function, slots, arguments)
        code = versions[chosen == "d"](*given)
        if answers and code == 1:
            raise MemoryError(f"{function}: no memory for packed copies")
        if answers and code:
            raise IndexError(f"{function}: an index lies outside of what it counts")
    return call


def _checked(function: str, slots: tuple[Slot, ...], arguments: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """(the dtype of the arrays that choose the version, what ctypes takes), or an error that says what does not fit."""
    if len(arguments) != len(slots):              # ctypes would hand on what is too much
        raise TypeError(f"{function}: called with another number of arguments than it has")
    chosen, given = "", list(arguments)
    for place, (slot, x) in enumerate(zip(slots, arguments)):
        if slot.kind in "id" or (x is None and slot.optional):
            continue
        # ctypes takes any integer for an address
        letter = x.dtype.char if isinstance(x, np.ndarray) and x.dtype.isnative else "no array"
        if slot.kind == "X":
            chosen = chosen or (letter if letter in VERSIONS else "")
        if letter not in ((chosen or "?") if slot.kind == "X" else DTYPES[slot.kind] or letter):
            raise TypeError(f"{function}: argument {place} has another dtype than C takes it for")
        if not (x.flags.c_contiguous and x.flags.aligned and (x.flags.writeable or not slot.written)):
            raise ValueError(f"{function}: argument {place} is an array with gaps, not aligned, or read-only, yet written to")
        given[place] = x.ctypes.data
    numbers = [x for slot, x in zip(slots, given) if slot.kind != "d"]
    for place, (slot, x) in enumerate(zip(slots, arguments)):
        if slot.size and x is not None and not 0 <= _wanted(slot.size, numbers) <= (x.nbytes if slot.kind == "M" else x.size):
            raise ValueError(f"{function}: argument {place} has {x.size} numbers, and those of the call say more, or nothing")
    return chosen, given


def _wanted(size: str, numbers: list[Any]) -> int:
    """How many numbers an array must have; -1 where a factor is negative, or a divisor is not positive."""
    total = 0
    for term in size.split("+"):
        count = 1
        for divides, letter in re.findall(r"(/?)([0-9]+|[a-z])", term):
            factor = int(letter) if letter.isdigit() else numbers[ord(letter) - ord("a")]
            if factor < bool(divides):
                return -1
            count = -(-count // factor) if divides else count * factor
        total += count
    return total


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

