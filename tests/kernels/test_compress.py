"""Blocks of few bits and thin products: C against NumPy's expressions bit by bit, and both against what defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import compress, digits, lowrank

SIZES = ([0], [1], [7], [8], [255], [256], [257], [4095], [4096], [4097], [10000, 3, 17, 0, 256, 255, 257])
BLOCKS = {"int8": 256, "int4": 256, "onebit": 4096, "twomeans": 256, "topk": 4096}
TINY_NUMBER = np.float32(1e-40)


def arrays(size: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Values and residuals: ordinary, ties, denormal, all equal, zero, not finite, huge."""
    rng = np.random.default_rng(size)
    x, e = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {
        "ordinary": (x, e), "without residual": (x, None), "ties": (np.round(x), np.zeros_like(x)),
        "denormal": (x * TINY_NUMBER, e * TINY_NUMBER), "equal": (np.full_like(x, 0.3), None), "zero": (x * 0, e * 0),
        "huge": (np.clip(x, -2, 2) * np.float32(1.5e38), e)}
    for name, value in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
        found[name] = x.copy(), e
        found[name][0][size // 2:size // 2 + 1] = value
    return found


def bounds_of(sizes: list[int], block: int) -> np.ndarray:
    ends = np.cumsum([0, *sizes])
    return np.concatenate([*(np.arange(a, b, block) for a, b in zip(ends, ends[1:])), ends[-1:]]).astype(np.int64)


def nearest_bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest of the numbers with 16 bits less, ties to even, from those below and above in float64."""
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
        step = np.where(np.isfinite(above), above, np.copysign(np.float64(2.0 ** 128), x)).astype(float)
        middle = (below.astype(float) + step) / 2
        up = (np.abs(x) > np.abs(middle)) | ((x == middle) & (below.view(np.uint32) >> 16 & 1 == 1))
    return np.where(np.isfinite(x), np.where(up, above, below), x)


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """To the bit; where float32 are NaN, their payload is free."""
    if a is None or b is None or a.tobytes() == b.tobytes():
        return a is b or (a is not None and b is not None)
    nan = np.isnan(a) if a.dtype == np.float32 else np.zeros(a.shape, bool)
    return bool((nan == (np.isnan(b) if b.dtype == np.float32 else nan)).all() and a[~nan].tobytes() == b[~nan].tobytes())


def compiled(module: Any, name: str) -> Any:
    found = module.compiled(name)
    if found is None:
        pytest.skip(f"no compiled version: {native.missing()}")
    return found


def coded(run: Any, name: str, values: np.ndarray, error: np.ndarray | None, bounds: np.ndarray) -> list[Any]:
    """Scales and bits of a format, the residual, what is decoded, and what is added to ones."""
    bits = {"int8": 8, "int4": 4, "onebit": 1, "twomeans": 1}[name]
    scales = np.empty((len(bounds) - 1) * (2 if name == "twomeans" else 1), np.float32)
    q = np.full(int(((np.diff(bounds) * bits + 7) // 8).sum()), 0xA5, np.uint8)
    left = None if error is None else error.copy()
    run(f"{name}_encode")(values, left, bounds, scales, q)
    found, added = np.empty_like(values), np.ones_like(values)
    run(f"{name}_decode")(q, bounds, scales, found, 0)
    run(f"{name}_decode")(q, bounds, scales, added, 1)
    return [scales, q, left, found, added]


@pytest.mark.parametrize("name", ["int8", "int4", "onebit", "twomeans"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_in_c_have_the_bits_of_numpy(name: str, sizes: list[int]) -> None:
    compiled(compress, f"{name}_encode")
    bounds = bounds_of(sizes, BLOCKS[name])
    for case, (values, error) in arrays(sum(sizes)).items():
        ours, defined = (coded(run, name, values, error, bounds) for run in (compress.compiled, compress.REFERENCE.__getitem__))
        for i, (a, b) in enumerate(zip(ours, defined)):
            assert same(a, b), (case, i)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_drawn_whole_numbers_in_c_have_the_bits_of_numpy(sizes: list[int]) -> None:
    bounds, size = bounds_of(sizes, 256), sum(sizes)
    words = np.random.default_rng(0).integers(0, 2 ** 32, size, np.uint32)
    for case, (values, error) in arrays(size).items():
        found = []
        for run in (compiled(compress, "int8_draw"), compress.REFERENCE["int8_draw"]):
            scales, q = np.empty(len(bounds) - 1, np.float32), np.empty(size, np.uint8)
            left = None if error is None else error.copy()
            run(values, left, bounds, words, scales, q)
            found.append((scales, q, left))
        for a, b in zip(*found):
            assert same(a, b), case


@pytest.mark.parametrize("name,most", [("int8", 127), ("int4", 7)])
def test_a_whole_number_is_the_nearest_one_by_the_largest_of_its_block(name: str, most: int) -> None:
    values, _ = arrays(1000)["ordinary"]
    bounds = bounds_of([1000], 256)
    scales, q, _, found, _ = coded(compress.version_of, name, values, None, bounds)
    for start, stop, scale in zip(bounds, bounds[1:], scales):
        assert scale == np.abs(values[start:stop]).max() / np.float32(most)
        assert np.abs(values[start:stop].astype(float) - found[start:stop]).max() <= scale * (0.5 + 1e-5 * most)
    if name == "int8":
        assert (found == q.view(np.int8) * np.repeat(scales, np.diff(bounds))).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("levels", [3, 5, 7, 9, 11])
def test_levels_are_the_digits_of_words(sizes: list[int], levels: int) -> None:
    """By Python's whole numbers, whose digits are found one after the other; C has the bits of the expressions."""
    compiled(digits, "digits_encode")
    bounds, half = bounds_of(sizes, 256), levels // 2
    counts = [-(-size // digits.DIGITS[levels]) for size in np.diff(bounds)]
    for case, (values, error) in arrays(sum(sizes)).items():
        found = []
        for run in (digits.version_of, digits.REFERENCE.__getitem__):
            scales, words = np.empty(len(bounds) - 1, np.float32), np.full(sum(counts), 0xA5, np.uint32)
            left = None if error is None else error.copy()
            run("digits_encode")(values, left, bounds, scales, words, levels)
            total, added = np.empty_like(values), np.ones_like(values)
            run("digits_decode")(words, bounds, scales, total, levels, 0)
            run("digits_decode")(words, bounds, scales, added, levels, 1)
            found.append((scales, words, left, total, added))
        assert all(map(same, *found)), case
        (scales, words, left, total, _), at = found[0], 0
        a = values if error is None else values + error
        for start, stop, count, scale in zip(bounds, bounds[1:], counts, scales):
            q = np.zeros(count * digits.DIGITS[levels])
            for w in range(count):
                word = int(words[at + w])
                for k in range(digits.DIGITS[levels]):
                    word, digit = divmod(word, levels)
                    q[w + k * count] = digit - half
                assert word == 0
            at += count
            block, finite = a[start:stop].astype(float), np.isfinite(scale)
            assert same(total[start:stop], q[:stop - start].astype(np.float32) * scale) and not q[stop - start:].any()
            assert not finite or (np.abs(block - q[:stop - start] * scale) <= scale * 0.5001 + 1e-30).all(), case
            if left is not None and error is not None:
                kept = left[start:stop].astype(float)
                assert (kept + total[start:stop] == block).all() if finite else same(left[start:stop], error[start:stop]), case


def test_one_bit_is_the_sign_and_the_mean_size_of_its_block() -> None:
    values, error = arrays(5000)["ordinary"]
    assert error is not None
    a = values + error
    scales, q, _, found, _ = coded(compress.version_of, "onebit", values, error, bounds_of([5000], 4096))
    assert np.allclose(scales, [np.abs(a[:4096]).mean(), np.abs(a[4096:]).mean()], rtol=1e-6)
    assert (np.unpackbits(q, bitorder="little")[:5000] == np.signbit(a)).all() and (np.signbit(found) == np.signbit(a)).all()


def test_two_values_are_the_means_of_what_has_them_and_nearest_to_it() -> None:
    """A block of two clusters is sent as their means; any other one as a fixed point of Lloyd's algorithm, nearly."""
    rng = np.random.default_rng(0)
    clusters = np.where(rng.random(256) < 0.2, 5, -0.1).astype(np.float32) + rng.standard_normal(256).astype(np.float32) / 100
    values = np.concatenate([clusters, rng.standard_normal(300).astype(np.float32) ** 3])
    bounds = bounds_of([556], 256)
    means, q, _, found, _ = coded(compress.version_of, "twomeans", values, None, bounds)
    low = np.concatenate([np.unpackbits(part, bitorder="little") for part in np.split(q, [32, 64])])[:556].astype(bool)
    assert (low[:256] == (clusters < 1)).all()
    for i, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        block, side = values[start:stop].astype(float), low[start:stop]
        assert np.allclose([block[side].mean(), block[~side].mean()], means[2 * i:2 * i + 2], rtol=1e-6)
        assert block[side].max() < block[~side].min()
        assert np.square(block - found[start:stop]).sum() < np.square(block - np.sign(block) * np.abs(block).mean()).sum()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_largest_are_those_of_a_full_sort_with_ties_by_place(sizes: list[int], share: float) -> None:
    bounds = bounds_of(sizes, 4096)
    counts = np.ceil(np.diff(bounds) * share).astype(np.int64)
    for case, (values, error) in arrays(sum(sizes)).items():
        a = values if error is None else values + error
        order = [start + np.sort(np.argsort(-np.abs(a[start:stop]).view(np.int32), kind="stable")[:count])
                 for start, stop, count in zip(bounds, bounds[1:], counts)]
        expected = np.concatenate([np.zeros(0, np.int64), *order])
        for run in (compress.version_of, compress.REFERENCE.__getitem__):
            sent, places = np.empty(counts.sum(), np.uint16), np.empty(counts.sum(), np.uint16)
            left = None if error is None else error.copy()
            run("topk_encode")(values, left, bounds, counts, sent, places)
            assert (np.repeat(bounds[:-1], counts) + places == expected).all(), case
            near, arrived = nearest_bfloat16(a), np.zeros_like(a)
            arrived[expected] = near[expected]
            assert same((sent.astype(np.uint32) << 16).view(np.float32), near[expected]), case
            for start, stop in zip(bounds, bounds[1:]) if left is not None and error is not None else ():
                if not np.isfinite(near[start:stop]).all():
                    assert same(left[start:stop], error[start:stop]), case
                    continue
                assert (left[start:stop].astype(float) + arrived[start:stop] == a[start:stop]).all(), case
                assert (arrived[start:stop] + left[start:stop] == a[start:stop]).all(), case
            total = np.ones_like(values)
            run("topk_add")(sent, places, bounds, counts, total)
            one = np.ones_like(values)
            with np.errstate(invalid="ignore"):
                one += arrived
            assert same(total, one), case


def test_bounds_and_places_that_lie_outside_are_refused() -> None:
    x, bounds = np.ones(300, np.float32), bounds_of([300], 256)
    scales, q = np.empty(2, np.float32), np.empty(300, np.uint8)
    encode, add = compiled(compress, "int8_encode"), compiled(compress, "topk_add")
    for wrong in ([0, 256, 301], [0, -1, 300], [0, 256, 200]):
        with pytest.raises(IndexError, match="an index lies outside"):
            encode(x, None, np.array(wrong, np.int64), scales, q)
    with pytest.raises(IndexError, match="an index lies outside"):
        encode(np.ones(5000, np.float32), None, np.array([0, 5000], np.int64), scales[:1], np.empty(5000, np.uint8))
    with pytest.raises(IndexError, match="an index lies outside"):
        add(np.ones(2, np.uint16), np.array([3, 300], np.uint16), bounds, np.array([1, 1], np.int64), x)
    with pytest.raises(TypeError, match="another dtype"):
        encode(x.astype(np.float64), None, bounds, scales, q)
    with pytest.raises(ValueError, match="with gaps"):
        encode(np.ones(600, np.float32)[::2], None, bounds, scales, q)
    with pytest.raises(ValueError, match="299 numbers"):
        encode(x, x[:299].copy(), bounds, scales, q)


SHAPES = [(1, 1, 1), (4, 16, 4), (5, 17, 3), (33, 100, 7), (64, 64, 8), (3, 5, 2), (13, 31, 5), (8, 1, 1)]


@pytest.mark.parametrize("m,k,r", SHAPES)
def test_thin_products_in_c_have_the_bits_of_numpy_and_the_values_of_float64(m: int, k: int, r: int) -> None:
    rng = np.random.default_rng(m)
    values, error, p, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (m, k), (r, m), (r, k)))
    compiled(lowrank, "lowrank_left")
    for e in (error, None):
        matrix = values.astype(float) if e is None else (values + e).astype(float)
        for name, arguments, exact in (("left", (values, e, q), q @ matrix.T), ("right", (values, e, p), p @ matrix),
                                       ("product", (p, q), p.T.astype(float) @ q)):
            ours, defined = (np.empty(exact.shape, np.float32) for _ in range(2))
            lowrank.compiled(f"lowrank_{name}")(*arguments, ours)
            lowrank.REFERENCE[f"lowrank_{name}"](*arguments, defined)
            assert ours.tobytes() == defined.tobytes() and np.allclose(ours, exact, atol=1e-4, rtol=1e-4), name
    ours, defined = error.copy(), error.copy()
    lowrank.leave(values, ours, p, q)
    lowrank.REFERENCE["lowrank_leave"](values, defined, p, q)
    exact = values.astype(float) + error - p.T.astype(float) @ q
    assert ours.tobytes() == defined.tobytes() and np.allclose(ours, exact, atol=1e-4)
