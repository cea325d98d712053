"""16-bit numbers on the wire against exact arithmetic, and the C code against NumPy, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, open_device

from mpitrain.backend import native
from mpitrain.errors import ConfigError
from mpitrain.kernels import wire
from mpitrain.kernels.device.wire import format_of as device_format

NAMES = list(wire.REFERENCE)
ALL = np.arange(1 << 16, dtype=np.uint16)


def hard_cases() -> np.ndarray:
    """Each 16-bit pattern as the upper half of a float32 with every kind of lower half: ties, their neighbours, denormals."""
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000], np.uint32)
    return (ALL.astype(np.uint32)[:, None] << 16 | tails).reshape(-1).view(np.float32)


def pack(name: str, x: np.ndarray) -> np.ndarray:
    to = np.empty(x.size, np.uint16)
    wire.format_of(name).pack(x, to)
    return to


def unpack(name: str, packed: np.ndarray) -> np.ndarray:
    x = np.empty(packed.size, np.float32)
    wire.format_of(name).unpack(packed, x)
    return x


@pytest.mark.parametrize("name", NAMES)
def test_every_packed_number_survives_the_way_there_and_back(name: str) -> None:
    there = unpack(name, ALL)
    back = pack(name, there)
    assert (back == np.where(np.isnan(there), wire.NAN[name], ALL)).all()
    assert np.isnan(there).sum() == {"bfloat16": 2 * 127, "float16": 2 * 1023}[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_number_goes_to_the_nearest_and_a_tie_to_the_even_one(name: str) -> None:
    rng, cases = np.random.default_rng(1), hard_cases()
    x = np.concatenate([cases[np.isfinite(cases)], np.float32([65519.9, 65520, 65504, 2**-25, 2**-24, 2**-14]),
                        rng.standard_normal(1000).astype(np.float32)])
    numbers = unpack(name, ALL)
    exact = np.unique(numbers[np.isfinite(numbers)].astype(np.float64))      # differences of neighbours are exact in float64
    true, packed = x.astype(np.float64), pack(name, x)
    found = unpack(name, packed).astype(np.float64)
    at = np.searchsorted(exact, true)
    below, above = (np.abs(exact[np.clip(at + i, 0, len(exact) - 1)] - true) for i in (-1, 0))
    finite = np.isfinite(found)
    assert (np.abs(found - true)[finite] == np.minimum(below, above)[finite]).all()
    ties = finite & (below == above) & (at > 0) & (at < len(exact))
    assert ties.sum() > 100 and (packed[ties] % 2 == 0).all()
    beyond = exact[-1] + (exact[-1] - exact[-2]) / 2                         # a tie with what would be the next number
    assert ((np.abs(true) >= beyond) == ~finite).all() and (np.sign(found) == np.sign(true))[~finite].all()


@pytest.mark.parametrize("name", NAMES)
def test_infinity_zero_and_nan_keep_their_kind_and_sign(name: str) -> None:
    x = np.float32([np.inf, -np.inf, 0.0, -0.0, np.nan, -np.nan, 3.4e38, -3.4e38])
    x[4:6].view(np.uint32)[...] = [0x7F800001, 0xFFFFFFFF]            # NaNs whose upper half alone would be infinite
    found = unpack(name, pack(name, x))
    assert (found[:2] == x[:2]).all() and np.signbit(found[3]) and not np.signbit(found[2]) and (found[2:4] == 0).all()
    assert np.isnan(found[4:6]).all()
    assert np.isinf(found[6:]).all() and (np.sign(found[6:]) == [1, -1]).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_functions_give_the_bits_of_numpy(name: str) -> None:
    functions = wire.compiled(name)
    if functions is None:
        pytest.skip(f"no compiled version: {native.missing()}")
    x = hard_cases()
    for size in (0, 1, 15, 33, x.size):
        given = [np.resize(ALL[::-7], size), x[:size].copy(), np.zeros(size, np.uint16)]
        for what, reference in wire.REFERENCE[name].items():
            first = given if what.startswith("add") else given[:2] if what == "unpack" else given[1:]
            arrays = [[a.copy() for a in first[:reference.__code__.co_argcount]] for _ in range(2)]
            functions[what](*arrays[0])
            reference(*arrays[1])
            for a, b in zip(*arrays):
                same = a.tobytes() == b.tobytes()
                if a.dtype == np.float32 and not same:                # a NaN's payload is free where it is not packed
                    nan = np.isnan(a)
                    same = (nan == np.isnan(b)).all() and a[~nan].tobytes() == b[~nan].tobytes()
                assert same, (what, size)


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_float32_and_what_is_packed_is_the_rounded_sum(name: str) -> None:
    rng = np.random.default_rng(2)
    x, packed = rng.standard_normal(1000).astype(np.float32), pack(name, rng.standard_normal(1000).astype(np.float32))
    total = unpack(name, packed) + x
    added, rounded, to, only = x.copy(), x.copy(), np.empty(1000, np.uint16), np.empty(1000, np.uint16)
    wire.format_of(name).add(packed, added)
    wire.format_of(name).add_round(packed, rounded, to)
    wire.format_of(name).add_pack(packed, x, only)
    assert added.tobytes() == total.tobytes()
    assert to.tobytes() == only.tobytes() == pack(name, total).tobytes() and rounded.tobytes() == unpack(name, to).tobytes()


def test_an_unknown_wire_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r'^unknown wire format "bfloat" \(did you mean "bfloat16"\?\)$'):
        wire.format_of("bfloat")

on_a_device = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def bits(x: np.ndarray) -> np.ndarray:
    """Its bits; those of float32 with one NaN for all, since a sum's NaN is each machine's own."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@on_a_device
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("what", list(wire.SIGNATURES))
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_on_a_device_has_the_bits_of_the_hosts(name: str, what: str, shift: int, device: str) -> None:
    xp, move, _ = open_device(device)
    x = np.concatenate([hard_cases()[7::41], np.float32([65519.9, 65520, 65504, 2**-25, 2**-24, 2**-14, np.inf, np.nan])])
    packed = np.resize(np.random.default_rng(1).permutation(ALL), x.size)
    to = np.full(x.size, 0x1234, np.uint16)
    order = {"pack": (x, to), "unpack": (packed, x), "round": (x, to), "add": (packed, x)}.get(what, (packed, x, to))
    host = [array[shift:].copy() for array in order]
    there = [move(array)[shift:] for array in order]
    with np.errstate(all="ignore"):
        getattr(wire.format_of(name), what)(*host)
    getattr(device_format(name), what)(*there)
    for made, right in zip(there, host, strict=True):
        np.testing.assert_array_equal(bits(made.get()), bits(right))


@on_a_device
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 4097])
def test_arrays_of_16_bit_floats_are_packed_to_as_well_as_integers(name: str, n: int) -> None:
    xp, move, _ = open_device("stand-in")
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float16)
    to, back = xp.empty(n, dtype), xp.empty(n, np.float32)
    device_format(name).pack(move(x), to)
    device_format(name).unpack(to, back)
    np.testing.assert_array_equal(to.get(), x.astype(dtype))
    np.testing.assert_array_equal(back.get(), x.astype(dtype).astype(np.float32))


@on_a_device
def test_other_names_and_arrays_are_refused() -> None:
    _, move, _ = open_device("stand-in")
    with pytest.raises(ConfigError, match='unknown wire format "float61"'):
        device_format("float61")
    with pytest.raises(TypeError, match="is float64, expected float32"):
        device_format("float16").pack(move(np.ones(3)), move(np.zeros(3, np.uint16)))
