"""Philox words, uniform and normal numbers on a device, with the host's bits; see kernels/random.py."""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, contiguous, over
from mpitrain.kernels.random import signed

SOURCE, WIDE = Source("random"), 256                                  # random.cu's WIDE
_random_words = SOURCE.function("random_words", "U!:hw L:h L?:1 i ih iw")


def key_of(key: Any) -> tuple[Array | None, int]:
    """A key as kernels take it: (the array that it is stored in, 0), or (None, the number)."""
    return (None, signed(key)) if isinstance(key, int) else (contiguous(key), 0)


@device("random_words")
def random_words(rows: Array, key: Any, width: int) -> Array:
    xp = array_module(rows)
    out = xp.empty((len(rows), width), xp.uint32)
    if out.size:
        _random_words(over(len(rows) * -(-width // 4)), WIDE, out, contiguous(rows), *key_of(key), *out.shape)
    return out


def _elements(name: str) -> None:
    run = SOURCE.function(name, "D!:n i i in")

    @device(name)
    def fill(out: Array, key: int, start: int) -> Array:
        if out.size:
            run(over(out.size), WIDE, out, signed(key), signed(start), out.size)
        return out


_elements("random_uniform")
_elements("random_normal")
