"""The door to device code: a kernel of ``native/device`` sees addresses, so each call is checked against a signature first.

Signatures are written as those of C functions (`kernels.door.slots_of`), with other dtypes for X: float32, float64, bfloat16 or
float16, all of one call the same, which choose the kernel ``<name>_<dtype>``; H is 16 bits of any kind, S float32 where X has 16
bits, and else X's.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import index
from typing import Any, NoReturn

from mpitrain.backend.namespace import Array, array_module, is_array
from mpitrain.backend.runtime import Grid, Launch, runtime
from mpitrain.kernels.door import Slot, least, slots_of


class Anything:
    """Has all dtypes."""

    def __contains__(self, dtype: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(("anything",))


FORMATS = ("float32", "float64", "bfloat16", "float16")
DTYPES: dict[str, Any] = {
    "X": FORMATS, "F": ("float32",), "D": ("float64",), "H": ("bfloat16", "float16", "int16", "uint16"), "I": ("int32",),
    "U": ("uint32",), "L": ("int64", "uint64"), "B": ("uint8", "int8", "bool"), "S": ("float32", "float64"), "M": Anything()}
ALIGNED, LEAST_ALIGNED = 64, 1024                     # numbers; of so many columns the gap is 6 % at most
COMPUTED = {"float64": ("float64",), "float32": ("float32",), "bfloat16": ("float32",), "float16": ("float32",)}


class Source:
    """``native/device/<name>.cu``."""

    def __init__(self, name: str):
        self.name = name

    def function(self, name: str, signature: str) -> DeviceFunction:
        return DeviceFunction(self.name, name, slots_of(signature))


class DeviceFunction:
    """A kernel for each format of its arrays, or one kernel where no argument is an X.

    Called with (grid, threads of a block, arguments, shared=bytes). TypeError, ValueError or OverflowError where the arguments
    are not those of the signature; RuntimeError where the device has no such kernel.
    """

    def __init__(self, source: str, name: str, slots: tuple[Slot, ...]):
        self.source, self.name, self.slots = source, name, slots
        self._launches: dict[tuple[str, str], Launch] = {}
        self._names = [chr(ord("a") + i) for i in range(len(slots))]

    def __call__(self, grid: Grid, threads: int, *arguments: Any, shared: int = 0) -> None:
        module, chosen, given = self._checked(arguments)
        key = module, chosen
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._found(*key)
        launch(grid, threads, given, shared)

    def _found(self, module: str, chosen: str) -> Launch:
        name = f"{self.name}_{chosen}" if chosen else self.name
        device = runtime(module)
        found = None if device is None else device.function(self.source, name)
        if found is None:
            raise RuntimeError(f"{name}: {module} has no such kernel")
        return found

    def _checked(self, arguments: tuple[Any, ...]) -> tuple[str, str, list[Any]]:
        if len(arguments) != len(self.slots):
            raise TypeError(f"{self.name}: called with {len(arguments)} arguments, expected {len(self.slots)}")
        given: list[Any] = list(arguments)
        numbers: dict[str, int] = {}
        place = 0
        for i, slot in enumerate(self.slots):
            if slot.kind == "i":
                given[i] = numbers[self._names[place]] = value = index(given[i])
                if not -1 << 63 <= value < 1 << 63:
                    raise OverflowError(f"{self.name}: argument {i} is an integer of more than 64 bits")
            elif slot.kind == "d":
                given[i] = float(given[i])
            place += slot.kind != "d"
        module = chosen = ""
        steps: dict[int, list[int]] = {}
        for i, slot in enumerate(self.slots):
            x = given[i]
            if slot.kind in "id" or (x is None and slot.optional):
                steps[i] = [0] * (len(slot.size) - 1) if slot.strided else []
                continue
            if not is_array(x):
                self._refuse(i, f"is {type(x).__name__}, expected an array")
            here = array_module(x).__name__
            if here != (module or here) or runtime(here) is None:
                self._refuse(i, f"is an array of {here}, expected one of {module or 'a device'}")
            module, dtype = here, x.dtype.name
            wanted_dtypes = COMPUTED[chosen] if slot.kind == "S" and chosen else DTYPES[slot.kind]
            if dtype not in wanted_dtypes or slot.kind == "X" and dtype != (chosen or dtype):
                self._refuse(i, f"is {dtype}, expected {chosen if slot.kind == 'X' and chosen else ' or '.join(wanted_dtypes)}")
            if slot.kind == "X":
                chosen = dtype
            if slot.strided:
                steps[i] = self._steps(i, x, tuple(numbers[letter] for letter in slot.size))
                continue
            if not x.flags.c_contiguous:
                self._refuse(i, "is an array with gaps")
            wanted, has = least(slot.size, numbers) if slot.size else 0, x.nbytes if slot.kind == "M" else x.size
            if not 0 <= wanted <= has:
                self._refuse(i, f"has {has} {'bytes' if slot.kind == 'M' else 'numbers'}, and those of the call say {wanted}")
        return module, chosen, [part for i, x in enumerate(given) for part in (x, *steps.get(i, ()))]

    def _steps(self, place: int, x: Any, shape: tuple[int, ...]) -> list[int]:
        """How many numbers lie between neighbours in each dim but the last; what a kernel finds with them is x's own memory."""
        if x.shape != shape:
            self._refuse(place, f"has shape {x.shape}, and the numbers of the call say {shape}")
        if x.size and shape[-1] != 1 and x.strides[-1] != x.itemsize or any(step % x.itemsize for step in x.strides):
            self._refuse(place, f"has rows with gaps: its strides are {x.strides} bytes")
        return [step // x.itemsize for step in x.strides[:-1]]

    def _refuse(self, place: int, why: str) -> NoReturn:
        raise TypeError(f"{self.name}: argument {place} {why}")


def contiguous(x: Array | None, dtype: Any = None) -> Any:
    """The array without gaps, of that dtype: itself, or a copy; None stays None."""
    if x is None:
        return None
    x = x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


def along_rows(x: Array) -> Any:
    """The array with the numbers of a row one after the other, wherever rows lie: itself, or a copy."""
    return x if x.strides[-1] == x.itemsize or x.shape[-1] == 1 else array_module(x).ascontiguousarray(x)


def aligned_rows(xp: Any, rows: int, columns: int, dtype: Any) -> Any:
    """A new matrix whose rows begin at multiples of 16 bytes where that pays: the first columns of a wider one.

    GPT-2's 50,257 columns are the case: rows that begin anywhere have no loads of 16 bytes in a product on tensor cores, and so
    rows lie 64 numbers apart, or a multiple of that, which is a cache line of 16-bit numbers. What is beyond the columns is
    written by nobody and read by nobody. Fewer columns than LEAST_ALIGNED, such as those of ten classes, stay without gaps.
    """
    if columns < LEAST_ALIGNED or columns * dtype.itemsize % 16 == 0 or dtype.itemsize > 4:
        return xp.empty((rows, columns), dtype)
    return xp.empty((rows, -(-columns // ALIGNED) * ALIGNED), dtype)[:, :columns]


def computed(dtype: Any) -> str:
    """The name of the format that numbers of this one are computed in on a device."""
    return COMPUTED[dtype.name][0]


def over(n: int, threads: int = 256, most: int = 1 << 16) -> Grid:
    """A grid of blocks for n numbers, of which each thread takes one, or goes on by the size of the grid."""
    return (max(1, min(-(-n // threads), most)),)
