"""The plan of one rank for one collective on arrays of one size: made once, kept, and run as often as wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.comm.messages.packing import compacted, packed
from mpitrain.comm.messages.program import MESSAGE_BYTES, Messages, needed, plain, translate
from mpitrain.comm.messages.signature import Signature
from mpitrain.errors import ShapeError
from mpitrain.kernels.wire import Format, format_of
from mpitrain.schedules.steps import Algorithm, data

if TYPE_CHECKING:
    from mpitrain.backend import Array
    from mpitrain.comm.messages.buffers import Host, Pool, Values
    from mpitrain.comm.messages.bus import Crossing
    from mpitrain.comm.work import Work

PACKED = np.dtype(np.uint16)


class Plan(NamedTuple):
    """What one rank does, and how many elements it uses of each buffer besides the data."""

    rounds: list[Messages]
    elements: dict[str, int]
    crossing: Crossing | None = None                          # what goes over the bus, where a device packs


def make_plan(algorithm: Algorithm, rank: int, n: int, length: int, itemsize: int, message_bytes: int = MESSAGE_BYTES,
              results: Sequence[tuple[int, int]] | None = None, on_all_ranks: bool = False, device_packs: bool = False) -> Plan:
    """The plan of one rank. With `results` (the elements [start, stop) that count at the end) messages are packed to 16 bits;
    a result that is `on_all_ranks` is rounded on all of them, so that it has the same bits. With `device_packs` packed values
    lie beside the whole data, where a device puts them and takes them from."""
    stages, crossing = plain(algorithm(rank, n, length)), None
    buffers = ["inbox"]
    if results is not None:
        stages = packed(stages, [data(start, stop) for start, stop in results], on_all_ranks)
        if device_packs:
            from mpitrain.comm.messages.bus import across_the_bus
            stages, crossing = across_the_bus(stages, results, on_all_ranks)
        else:
            stages = compacted(stages)
        buffers += ["inbox16"] if device_packs else ["data16", "inbox16"]
    sizes = {"data": itemsize, "inbox": itemsize, "data16": 2, "inbox16": 2}
    return Plan(translate(stages, sizes, message_bytes), {buffer: needed(stages, buffer) for buffer in buffers}, crossing)


def memory_of(plan: Plan, values: Values, pool: Pool) -> tuple[dict[str, Host], list[Host]]:
    """The arrays that a plan names, the `values` on the host as the data, and the buffers lent by the pool."""
    host = values.host
    memory, lent = {"data": host} if values.packed is None else {"data": host, "data16": values.packed}, []
    for buffer, elements in plan.elements.items():
        dtype = PACKED if buffer.endswith("16") else host.dtype
        lent.append(pool.take(elements * dtype.itemsize))
        memory[buffer] = lent[-1][:elements * dtype.itemsize].view(dtype)
    return memory, lent


class Recipe(NamedTuple):
    """The part of a collective that all arrays of a kind share: its steps, its signature, the format of its numbers."""

    plan: Plan
    signature: Signature
    packing: Format | None                                    # the messages have this format
    widened: Format | None                                    # the array has it, where it is summed as float32


class Prepared:
    """A collective over one array: `comm.work.Collective`."""

    __slots__ = ("run", "start")

    def __init__(self, start: Callable[[], Work], run: Callable[[], None] | None = None):
        self.start = start
        self.run = run if run is not None else lambda: start().wait()


class Landed:
    """The work of a collective of one rank: nothing is sent."""

    done = True

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """The array is its own sum."""


ALONE = Prepared(Landed, lambda: None)


def formats(array: Array, dtype: str | None, name: str, wire: Format | None,
            keeps_wide: bool) -> tuple[Format | None, Format | None, str]:
    """The format of the values to sum where that is 16 bits wide, the format of the messages, and both in words.

    `wire` is the format for messages of float32. 16-bit numbers travel as they are, unless `wire` says otherwise or `keeps_wide`.
    """
    if dtype is not None and (dtype != "bfloat16" or dtype_name(array.dtype) != "uint16"):
        raise ShapeError(f'"{name}": dtype="{dtype}" of an array of {array.dtype}; say dtype="bfloat16" of a uint16 array, '
                         f"and nothing of others")
    kind = dtype or dtype_name(array.dtype)
    if kind in ("bfloat16", "float16"):
        own = format_of(kind)
        packing = wire or (None if keeps_wide else own)
        return own, packing, kind if packing is own else f"{kind} as {'float32' if packing is None else packing.name}"
    packing = wire if kind == "float32" else None
    return None, packing, kind if packing is None else f"{kind} as {packing.name}"


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype; NumPy makes it anew each time, in several microseconds."""
    return str(dtype)
