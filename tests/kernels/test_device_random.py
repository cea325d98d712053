"""Random words, numbers and dropout's masks of a device are those of the host, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, open_device

from mpitrain.kernels.dropout import Dropping, dropout, dropout_grad
from mpitrain.kernels.kernel import kind
from mpitrain.kernels.random import random_normal, random_uniform, random_words

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
KEY = 0xF234567890ABCDEF
ROWS = np.array([0, 5, (1 << 40) + 3, (1 << 64) - 1], np.uint64)
WIDTHS = (0, 1, 3, 4, 7, 8, 9, 31, 32, 33, 255, 257, 1028)
STARTS: tuple[Any, ...] = (0, 1, 6, 8, (1 << 33) + 3, np.array([0, 3, (1 << 34) + 1, 8], np.uint64))


@pytest.mark.parametrize("device", DEVICES)
def test_words_are_those_of_the_host(device: str) -> None:
    _, put, array = open_device(device)
    for width in WIDTHS:
        made = random_words(put(ROWS), KEY, width)
        assert type(made) is array and made.dtype == np.uint32
        np.testing.assert_array_equal(made.get(), random_words(ROWS, KEY, width))
        stored = put(np.array([1, KEY], np.uint64))[1:]
        np.testing.assert_array_equal(random_words(put(ROWS), stored, width).get(), made.get())
        np.testing.assert_array_equal(random_words.reference(put(ROWS), stored, width).get(), made.get())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", [random_uniform, random_normal], ids=["uniform", "normal"])
def test_numbers_are_those_of_the_host(device: str, fill: Any) -> None:
    """Those of its compiled loops, which have a logarithm and cosine of their own; with NumPy's they agree to 1e-13."""
    xp, _, _ = open_device(device)
    for n, start in ((0, 3), (1, 0), (255, 1 << 40), (1037, (1 << 64) - 5000)):
        made = fill(xp.empty(n, "float64"), KEY, start).get()
        if kind() != "numpy":
            np.testing.assert_array_equal(made, fill(np.empty(n), KEY, start))
        np.testing.assert_allclose(made, fill.reference(np.empty(n), KEY, start), atol=1e-13)


@pytest.mark.skipif(kind() == "numpy", reason="without compiled loops the host makes all words before the first, 64 GiB of them")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dropout_has_the_bits_of_the_host(device: str, dtype: str) -> None:
    _, put, _ = open_device(device)
    rng = np.random.default_rng(1)
    for width in WIDTHS:
        x, added, grad = rng.standard_normal((3, len(ROWS), width)).astype(dtype)
        x[:, :1] = np.nan
        for start in STARTS:
            for p in (0.0, 0.3, 1 - 2**-40):
                first = start if isinstance(start, int) else put(start)
                y, bits = dropout(put(x), put(ROWS), KEY, p, put(added), first)
                right, mask = dropout(x, ROWS, KEY, p, added, start)
                np.testing.assert_array_equal(bits.get(), mask)
                np.testing.assert_array_equal(y.get(), right)
                stored = dropout(put(x), put(ROWS), put(np.array([KEY], np.uint64)), p, put(added), first)
                np.testing.assert_array_equal(stored[1].get(), mask)
                np.testing.assert_array_equal(dropout_grad(put(grad), bits, p).get(), dropout_grad(grad, mask, p))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_memory_that_lies_askew_is_the_same(device: str) -> None:
    """Loads of 16 bytes want multiples of 16; a view that starts elsewhere goes by single numbers."""
    _, put, _ = open_device(device)
    whole = np.random.default_rng(2).standard_normal(len(ROWS) * 264 + 1).astype("float32")
    x = whole[1:].reshape(len(ROWS), 264)
    y, bits = dropout(put(whole)[1:].reshape(len(ROWS), 264), put(ROWS), KEY, 0.3, None)
    right, mask = dropout(x, ROWS, KEY, 0.3, None)
    np.testing.assert_array_equal(bits.get(), mask)
    np.testing.assert_array_equal(y.get(), right)


def test_a_dropping_of_parts_says_the_same_words_to_both() -> None:
    """`first` of parts, and of pieces, is a number or an array; the masks of both are pieces of the whole's."""
    _, put, _ = open_device("stand-in")
    x = np.ones((len(ROWS), 48), "float32")
    whole = np.unpackbits(dropout(x, ROWS, KEY, 0.4, None)[1], axis=1, bitorder="little")
    for part in range(3):
        dropping = Dropping(put(ROWS), KEY, 0.4, part)
        _, bits = dropout(put(x[:, :16].copy()), dropping.rows, KEY, 0.4, None, dropping.first(16))
        np.testing.assert_array_equal(np.unpackbits(bits.get(), axis=1, bitorder="little"), whole[:, 16 * part:16 * part + 16])
        pieces = Dropping(put(ROWS), KEY, 0.4, 0, put(np.full(len(ROWS), 16 * part, np.uint64)))
        _, again = dropout(put(x[:, :16].copy()), pieces.rows, KEY, 0.4, None, pieces.first(16))
        np.testing.assert_array_equal(again.get(), bits.get())
