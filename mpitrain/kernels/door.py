"""The door to compiled code: what C functions and loops of Numba are called with, checked against their signatures each time.

What is compiled sees addresses and takes sizes on trust. A signature says of each array its dtype, whether it is written, and,
in terms of the integers of the call, how many numbers it must have. native/call.c reads the same table before functions of C;
`Door` is that check in Python, before loops of Numba, and before C on machines where call.c cannot be had.
"""

from __future__ import annotations

import re
from ctypes import c_double
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple, NoReturn

import numpy as np

# The letters of arrays, with the dtypes that they stand for as NumPy writes them; X is the dtype that chooses the version.
DTYPES = {"X": "fd", "F": "f", "D": "d", "H": "H", "I": "i", "U": "I", "L": "lqLQ", "B": "B?", "M": ""}
LETTERS = {np.dtype(letter): letter for letter in "fdlLiI?BHqQ"}           # of the machine's byte order
CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400                         # ndarray.flags.num
LEAST, MOST = -1 << 63, (1 << 63) - 1


class Slot(NamedTuple):
    """What a function takes in one place: an integer ("i"), a double ("d") or an array (a letter of DTYPES)."""

    kind: str
    optional: bool = False
    written: bool = False
    size: str = ""                                # in terms of integers: a is the first one; arrays count as integers
    strided: bool = False                         # rows may lie anywhere; `size` has the shape, a letter for each dim


def slots_of(signature: str) -> tuple[Slot, ...]:
    """A signature taken apart. It has a word for each argument: ``d`` is a double, ``i`` an integer, ``in`` an integer that sizes
    call n. A capital is an array: X float32 or float64, F float32, D float64, H 16 bits, I int32, U uint32, L int64 or uint64, B
    bytes or booleans, M memory of any kind; S, on a device alone, the format that numbers of X are computed in. After it, ``?``
    says that None may stand there, ``!`` that it is written to, and ``:mn`` that it has m n numbers or more (of M: bytes), where
    n may be written as a number; ``/8`` divides what stands before it, rounded up; ``+`` joins terms. Where no size is written,
    the body of the kernel must know it. ``~:bmn``, on a device alone: the array has the shape (b, m, n), its rows are without gaps
    and lie anywhere, and the kernel takes its address and then how many numbers lie between neighbours in each dim but the last.
    """
    found = [re.fullmatch(r"d|i([a-zA-Z])?|([XSFDHIULBM])(\??)(!?)(~?)(?::([a-zA-Z0-9/+]+))?", word) for word in signature.split()]
    assert all(found), f"a signature says {signature!r}"
    words = [match for match in found if match is not None]
    integers = [match[1] for match in words if match[0] != "d"]
    place = {name: chr(ord("a") + i) for i, name in enumerate(integers) if name is not None}
    return tuple(Slot(match[2], match[3] == "?", match[4] == "!", "".join(place[c] if c.isalpha() else c for c in match[6] or ""),
                      match[5] == "~")
                 if match[2] else Slot(match[0][0]) for match in words)


def least(size: str, integers: dict[str, int]) -> int:
    """How many numbers an array must have; -1 where a factor is negative, or a divisor is not positive."""
    total = 0
    for term in size.split("+"):
        count = 1
        for divides, letter in re.findall(r"(/?)([0-9]+|[a-z])", term):
            factor = int(letter) if letter.isdigit() else integers[letter]
            if factor < bool(divides):
                return -1
            count = -(-count // factor) if divides else count * factor
        total += count
    return total


class Door:
    """Lets the arguments of one function pass, or raises TypeError, ValueError or OverflowError with the function's name."""

    def __init__(self, name: str, slots: tuple[Slot, ...]):
        self.name, self.count = name, len(slots)
        self._arrays = [(place, slot, DTYPES[slot.kind], CONTIGUOUS | ALIGNED | (WRITEABLE if slot.written else 0))
                        for place, slot in enumerate(slots) if slot.kind not in "id"]
        self._integers = [place for place, slot in enumerate(slots) if slot.kind == "i"]
        self._doubles = [place for place, slot in enumerate(slots) if slot.kind == "d"]
        names = [chr(ord("a") + i) for i in range(self.count)]
        places = [place for place, slot in enumerate(slots) if slot.kind != "d"]
        self._names = [names[places.index(place)] for place in self._integers]
        self._least = lru_cache(256)(self._sizes)              # the same numbers come at each step of a run

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[str, list[Any]]:
        """(the letter of the dtype that chooses the version, "" where none does; the arguments, with integers and doubles)."""
        if len(arguments) != self.count:
            raise TypeError(f"{self.name}: called with another number of arguments than it has")
        given, chosen = list(arguments), ""
        for place in self._integers:
            given[place] = number = index(given[place])
            if not LEAST <= number <= MOST:
                raise OverflowError(f"{self.name}: argument {place} is an integer of more than 64 bits")
        for place in self._doubles:
            given[place] = c_double(given[place]).value        # `float` would read text
        sizes = self._least(tuple([given[place] for place in self._integers]))
        for (place, slot, letters, wanted), size in zip(self._arrays, sizes):
            x = given[place]
            if x is None and slot.optional:
                continue
            letter = LETTERS.get(x.dtype) if isinstance(x, np.ndarray) else None
            if slot.kind == "M":
                self._pass(place, x, wanted, size, x.nbytes if isinstance(x, np.ndarray) else None)
                continue
            if letter is None or letter not in letters or (slot.kind == "X" and letter != (chosen or letter)):
                raise TypeError(f"{self.name}: argument {place} has another dtype than it is taken for")
            if slot.kind == "X":
                chosen = letter
            if x.flags.num & wanted != wanted or (size is not None and not 0 <= size <= x.size):
                self._pass(place, x, wanted, size, x.size)
        return chosen, given

    def _sizes(self, numbers: tuple[int, ...]) -> tuple[int | None, ...]:
        """How many numbers each array must have; None where its signature does not say."""
        integers = dict(zip(self._names, numbers))
        return tuple(least(slot.size, integers) if slot.size else None for _, slot, _, _ in self._arrays)

    def _pass(self, place: int, x: Any, wanted: int, size: int | None, count: int | None) -> None:
        if count is None:
            raise TypeError(f"{self.name}: argument {place} is no array")
        lacking = wanted & ~x.flags.num
        if lacking:
            self._refuse(place, "is an array " + ("with gaps" if lacking & CONTIGUOUS else "whose numbers are not aligned"
                         if lacking & ALIGNED else "whose numbers are read-only, and would be written to"))
        if size is not None and not 0 <= size <= count:
            self._refuse(place, f"has {count} numbers, and those of the call say {size}")

    def _refuse(self, place: int, why: str) -> NoReturn:
        raise ValueError(f"{self.name}: argument {place} {why}")
