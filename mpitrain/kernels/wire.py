"""Numbers of 16 bits on the wire, sums in float32: what a message holds, and the arithmetic before and after it.

NumPy has no bfloat16, so packed values of either format live in uint16 arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.errors import ConfigError, nearest
from mpitrain.kernels.kernel import has_numba
from mpitrain.kernels.library import host

Host: TypeAlias = np.ndarray[Any, Any]
Function: TypeAlias = Callable[..., None]
NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}        # one for all, so that no bit depends on which operand of a sum was NaN


class Format(NamedTuple):
    """One 16-bit format. `x` are float32, `packed` and `to` uint16 arrays, contiguous, of one length, overlapping nowhere.

    Rounds to nearest, ties to even. The C code, loops of Numba and NumPy give the same bits.
    """

    name: str
    pack: Function                                   # (x, to): to = x, rounded
    unpack: Function                                 # (packed, x): x = packed
    round: Function                                  # (x, to): to = x = x, rounded: the sender keeps what the receiver gets
    add: Function                                    # (packed, x): x = packed + x, not rounded
    add_pack: Function                               # (packed, x, to): to = packed + x, rounded; x stays
    add_round: Function                              # (packed, x, to): to = x = packed + x, rounded


@cache
def format_of(name: str) -> Format:
    """The format called "bfloat16" or "float16"; ConfigError for another name."""
    if name not in REFERENCE:
        raise ConfigError(f'unknown wire format "{name}"{nearest(name, (*REFERENCE, "float32"))}')
    return Format(name, **(compiled(name) or REFERENCE[name]))


def wire_format(name: str | None) -> Format | None:
    """The same, and None for "float32" and None: nothing is packed."""
    return None if name is None or name == "float32" else format_of(name)


def pack_bfloat16(x: Host, to: Host) -> None:
    bits = x.view(np.uint32)
    to[...] = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    to[np.isnan(x)] = NAN["bfloat16"]


def unpack_bfloat16(packed: Host, x: Host) -> None:
    x.view(np.uint32)[...] = packed.astype(np.uint32) << 16


def pack_float16(x: Host, to: Host) -> None:
    with np.errstate(over="ignore", under="ignore"):
        to[...] = x.astype(np.float16).view(np.uint16)
    to[np.isnan(x)] = NAN["float16"]


def unpack_float16(packed: Host, x: Host) -> None:
    x[...] = packed.view(np.float16)


def _reference(pack: Function, unpack: Function) -> dict[str, Function]:
    def sum_of(packed: Host, x: Host) -> Host:
        total = np.empty_like(x)
        unpack(packed, total)
        with np.errstate(over="ignore", invalid="ignore"):
            total += x
        return total

    def round_(x: Host, to: Host) -> None:
        pack(x, to)
        unpack(to, x)

    def add(packed: Host, x: Host) -> None:
        x[...] = sum_of(packed, x)

    def add_round(packed: Host, x: Host, to: Host) -> None:
        pack(sum_of(packed, x), to)
        unpack(to, x)

    return {"pack": pack, "unpack": unpack, "round": round_, "add": add, "add_round": add_round,
            "add_pack": lambda packed, x, to: pack(sum_of(packed, x), to)}


REFERENCE = {"bfloat16": _reference(pack_bfloat16, unpack_bfloat16), "float16": _reference(pack_float16, unpack_float16)}


SIGNATURES = {"pack": "F:n H!:n in", "unpack": "H:n F!:n in", "round": "F!:n H!:n in", "add": "H:n F!:n in",
              "add_pack": "H:n F:n H!:n in", "add_round": "H:n F!:n H!:n in"}


def compiled(name: str) -> dict[str, Function] | None:
    """The C functions of one format, or Numba's loops; None where there is neither."""
    versions = {what: host("wire", f"{what}_{name}", signature)(_sized) for what, signature in SIGNATURES.items()}
    found = {what: version() or (version.loop("wire")() if has_numba() else None) for what, version in versions.items()}
    return {what: run for what, run in found.items() if run is not None} or None


def _sized(call: Function, *arrays: Host) -> None:
    call(*arrays, arrays[0].size)
