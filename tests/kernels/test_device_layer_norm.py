"""Layer and RMS norm on a device, over lengths of rows that take each way through the kernels, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, open_device

from mpitrain.kernels.device.layer_norm import BLOCKS, plan
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.layer_norm import row_norm, row_norm_gradients

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
KEY = 0xF234567890ABCDEF
DTYPES = {"float32": np.dtype("float32"), "float64": np.dtype("float64"), "float16": np.dtype("float16"),
          "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CLOSE = {"float32": 2e-6, "float64": 1e-13, "float16": 1e-3, "bfloat16": 8e-3}      # relative to the largest
SIZES = ((1, 1), (5, 3), (9, 8), (33, 17), (70, 64), (19, 104), (7, 264), (3, 500), (6, 768), (3, 1032), (2, 1601), (3, 3072),
         (2, 8192), (2, 8201), (2, 12000))


def near(made: Any, right: np.ndarray, tolerance: float) -> None:
    found = made.get().astype("float64")
    assert found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=0, atol=tolerance * max(np.abs(right).max(initial=0), 1e-30))


def numbers(dtype: str, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """x, what is added, grad, around (rows, columns) of the dtype; weight and bias (columns,), of float32 beside 16 bits."""
    rng = np.random.default_rng(rows * columns)
    made = (3 + rng.standard_normal((4, rows, columns))).astype(DTYPES[dtype])
    return (*made, *rng.standard_normal((2, columns)).astype("float64" if dtype == "float64" else "float32"))


def double(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.astype("float64") for x in arrays]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_rows_of_any_length(rows: int, columns: int, dtype: str, device: str) -> None:
    """Weights stay in float32 beside 16 bits; so do statistics and the sums over rows."""
    _, put, _ = open_device(device)
    x, added, grad, around, weight, bias = numbers(dtype, rows, columns)
    X, A, G, R, W, B = double(x, added, grad, around, weight, bias)
    tolerance = CLOSE[dtype]
    for more, b, centred in ((None, bias, True), (added, None, True), (None, None, False)):
        y, total, means, inverses, bits = row_norm(put(x), None if more is None else put(more), put(weight), None if b is None
                                                   else put(b), 1e-5, centred)
        assert bits is None and y.dtype == x.dtype and means.dtype == inverses.dtype == weight.dtype
        right = row_norm.reference(X, None if more is None else A, W, None if b is None else B, 1e-5, centred)
        near(total, right[1], tolerance)
        if columns > 8:                           # the deviation of two numbers is mostly their rounding
            near(y, right[0], 4 * tolerance)
        statistics = double(means.get(), inverses.get())
        made = row_norm_gradients(put(grad), total, put(weight), put(around), means, inverses, centred, (True, True))
        wanted = row_norm_gradients.reference(G, *double(total.get()), W, R, *statistics, centred, (True, True))
        assert made[1].dtype == made[2].dtype == weight.dtype
        for found, correct, most in zip(made[:3], wanted, (tolerance, min(tolerance, 2e-6), min(tolerance, 2e-6))):
            near(found, correct, 4 * most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 104, 768, 2048, 8200])
def test_what_is_dropped_before_the_norm_is_what_dropout_drops(columns: int, dtype: str, device: str) -> None:
    _, put, _ = open_device(device)
    x, added, grad, around, weight, bias = numbers(dtype, 6, columns)
    rows = np.array([3, 1 << 40, 7], np.uint64)
    stored = put(np.array([KEY], np.uint64))
    for key, part, firsts in ((KEY, 5, None), (stored, 0, np.array([8, 1 << 34, 3], np.uint64))):
        here = Dropping(rows, KEY, 0.3, part, firsts)
        there = Dropping(put(rows), key, 0.3, part, None if firsts is None else put(firsts))
        y, total, means, inverses, bits = row_norm(put(x), put(added), put(weight), put(bias), 1e-5, True, there)
        right = row_norm.reference(*double(x, added, weight, bias), 1e-5, True, here)
        np.testing.assert_array_equal(bits.get(), right[4])
        near(total, right[1], CLOSE[dtype])
        made = row_norm_gradients(put(grad), total, put(weight), put(around), means, inverses, True, (True, False), bits, 0.3)
        wanted = row_norm_gradients.reference(*double(grad, total.get(), weight, around, means.get(), inverses.get()), True,
                                              (True, False), right[4], 0.3)
        assert made[1] is made[2] is None
        near(made[0], wanted[0], 4 * CLOSE[dtype])
        near(made[3], wanted[3], 4 * CLOSE[dtype])
        kept = np.unpackbits(right[4], axis=1, bitorder="little").reshape(x.shape)
        assert not made[3].get().astype("float64")[kept == 0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns"), [(3 * 8 * BLOCKS, 24), (4 * BLOCKS + 5, 264), (BLOCKS + 1, 1100), (70, 8208)])
def test_two_runs_of_a_gradient_have_the_same_bits(rows: int, columns: int, device: str) -> None:
    """Sums over rows of more blocks than stay, each with several rows; and to 1e-6 those of float64."""
    _, put, _ = open_device(device)
    x, _, grad, _, weight, _ = numbers("float32", rows, columns)
    _, _, means, inverses, _ = row_norm(put(x), None, put(weight), None, 1e-5, True)
    given = put(np.full((2, columns), np.nan, "float32"))
    runs = [row_norm_gradients(put(grad), put(x), put(weight), None, means, inverses, True, (True, True), None, 0.0, outs)
            for outs in ((None, None), (given[0], given[1]))]
    np.testing.assert_array_equal(given[0].get(), runs[0][1].get())
    for one, other in zip(runs[0][:3], runs[1][:3]):
        np.testing.assert_array_equal(one.get(), other.get())
    right = row_norm_gradients.reference(*double(grad, x, weight), None, *double(means.get(), inverses.get()), True, (True, True))
    for made, correct in zip(runs[0][:3], right):
        near(made, correct, 2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [5, 64, 768, 1032, 9000])
def test_rows_of_equal_numbers_become_0_and_rows_that_overflow_nan(columns: int, device: str) -> None:
    _, put, _ = open_device(device)
    x = np.full((3, columns), 1e4 / 3, "float32")
    x[1] = np.where(np.arange(columns) % 2, 1e30, -1e30)
    x[2, 0] = np.nan
    y, _, means, _, _ = row_norm(put(x), None, put(np.ones(columns, "float32")), None, 1e-5, True)
    assert np.abs(y.get()[0]).max() < 1e-5 and means.get()[0] == x[0, 0]
    assert np.isnan(y.get()[1:]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_lies_askew_and_arrays_without_numbers(device: str) -> None:
    xp, put, _ = open_device(device)
    x = np.random.default_rng(3).standard_normal(7 * 264 + 1).astype("float32")
    w = np.random.default_rng(4).standard_normal(265).astype("float32")
    rows, weight = x[1:].reshape(7, 264), w[1:]
    made = row_norm(put(x)[1:].reshape(7, 264), None, put(w)[1:], None, 1e-5, True)
    near(made[0], row_norm.reference(*double(rows), None, *double(weight), None, 1e-5, True)[0], 4e-6)
    other = xp.empty(264, "float16")               # memory for a sum that has another format gets it rounded
    sums = row_norm_gradients(put(rows), put(rows), put(weight), None, *made[2:4], True, (False, True), None, 0.0, (None, other))
    assert sums[2] is other and sums[0] is sums[3] is None
    near(other, rows.astype("float64").sum(0), 1e-3)
    for shape in ((0, 8), (3, 0)):
        empty, one = xp.empty(shape, "float32"), xp.ones(shape[1], "float32")
        y, _, means, inverses, _ = row_norm(empty, None, one, None, 1e-5, True)
        dx, product, plain, _ = row_norm_gradients(empty, empty, one, None, means, inverses, True, (True, True))
        assert y.shape == dx.shape == shape and means.shape == shape[:1]
        assert product.get().tolist() == plain.get().tolist() == [0] * shape[1]


def test_plans_hold_a_row_in_registers_while_it_fits() -> None:
    for itemsize, most in ((2, 8192), (4, 8192), (8, 4096)):
        for columns in (*range(1, 70), *range(70, 10_000, 61), 1024, 1025, 4096, 4097, 8192, 8193):
            how = plan(columns, itemsize)
            assert how.threads % 32 == 0 and how.threads % how.group == 0 and how.group & (how.group - 1) == 0
            assert how.group <= 32 or how.rows == 1
            assert (how.units * how.group * 8 >= columns) if columns <= most else how.units == 0
