"""Numbers of 16 bits on the wire, packed and added on a device, so that half the bytes go to the host; see kernels/wire.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mpitrain.backend.namespace import Array
from mpitrain.errors import ConfigError, nearest
from mpitrain.kernels.device.code import DeviceFunction, Source, over
from mpitrain.kernels.wire import NAN, SIGNATURES, Format

SOURCE, WIDE, LANES = Source("wire"), 256, 4                          # wire.cu's WIDE and LANES


@cache
def format_of(name: str) -> Format:
    """The format called "bfloat16" or "float16" for arrays of a device, float32 and (packed) of any 16 bits.

    Its bits are those of the host's. ConfigError for another name.
    """
    if name not in NAN:
        raise ConfigError(f'unknown wire format "{name}"{nearest(name, (*NAN, "float32"))}')
    return Format(name, **{what: _launched(SOURCE.function(f"{what}_{name}", signature))
                           for what, signature in SIGNATURES.items()})


def _launched(run: DeviceFunction) -> Callable[..., Any]:
    def call(*arrays: Array) -> None:
        n = arrays[0].size
        if n:
            run(over(-(-n // LANES), WIDE), WIDE, *arrays, n)
    return call
