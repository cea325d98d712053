"""bfloat16 and float16 beside float32 as in native/sixteen.h: the same operations on bits, so the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops.mathematics import bits_of, choose, f, number_of

n32 = np.uint32


@register_jitable
def pack_b(x: Any) -> Any:
    bits = bits_of(x)
    rounded = n32(bits + n32(0x7FFF) + (bits >> n32(16) & n32(1))) >> n32(16)
    return np.uint16(choose(n32(bits & n32(0x7FFFFFFF)) > n32(0x7F800000), n32(0x7FC0), n32(rounded)))


@register_jitable
def unpack_b(x: Any) -> Any:
    return number_of(n32(n32(x) << n32(16)))


@register_jitable
def pack_f(x: Any) -> Any:
    bits = bits_of(x)
    size = n32(bits & n32(0x7FFFFFFF))
    normal = n32(n32(size - n32(112 << 23) + n32(0xFFF) + (size >> n32(13) & n32(1))) >> n32(13))
    denormal = n32(bits_of(number_of(size) + f(0.5)) - n32(0x3F000000))
    packed = choose(size < n32(113 << 23), denormal, choose(size < n32(143 << 23), normal, n32(0x7C00)))
    return np.uint16(choose(size > n32(0x7F800000), n32(0x7E00), n32(packed | (bits >> n32(16) & n32(0x8000)))))


@register_jitable
def unpack_f(x: Any) -> Any:
    size = n32(n32(x & np.uint16(0x7FFF)) << n32(13))
    exponent = n32(size & n32(31 << 23))
    normal = n32(size + choose(exponent == n32(31 << 23), n32(224 << 23), n32(112 << 23)))
    denormal = bits_of(number_of(n32(size + n32(113 << 23))) - f(2.0 ** -14))
    return number_of(n32(choose(exponent != n32(0), normal, denormal) | n32(n32(x & np.uint16(0x8000)) << n32(16))))


def packs(pack: Function) -> Function:
    def run(x: Any, to: Any, n: int) -> None:
        for i in range(n):
            to[i] = pack(x[i])
    return run


def unpacks(unpack: Function) -> Function:
    def run(packed: Any, x: Any, n: int) -> None:
        for i in range(n):
            x[i] = unpack(packed[i])
    return run


def rounds(pack: Function, unpack: Function) -> Function:
    def run(x: Any, to: Any, n: int) -> None:
        for i in range(n):
            to[i] = pack(x[i])
        for i in range(n):
            x[i] = unpack(to[i])
    return run


def adds(unpack: Function) -> Function:
    def run(packed: Any, x: Any, n: int) -> None:
        for i in range(n):
            x[i] = unpack(packed[i]) + x[i]
    return run


def adds_and_packs(pack: Function, unpack: Function) -> Function:
    def run(packed: Any, x: Any, to: Any, n: int) -> None:
        for i in range(n):
            to[i] = pack(unpack(packed[i]) + x[i])
    return run


def adds_and_rounds(pack: Function, unpack: Function) -> Function:
    def run(packed: Any, x: Any, to: Any, n: int) -> None:
        for i in range(n):
            to[i] = pack(unpack(packed[i]) + x[i])
        for i in range(n):
            x[i] = unpack(to[i])
    return run


def all_of(pack: Function, unpack: Function) -> tuple[Function, ...]:
    return (packs(pack), unpacks(unpack), rounds(pack, unpack), adds(unpack), adds_and_packs(pack, unpack),
            adds_and_rounds(pack, unpack))


pack_bfloat16, unpack_bfloat16, round_bfloat16, add_bfloat16, add_pack_bfloat16, add_round_bfloat16 = all_of(pack_b, unpack_b)
pack_float16, unpack_float16, round_float16, add_float16, add_pack_float16, add_round_float16 = all_of(pack_f, unpack_f)
