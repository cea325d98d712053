"""Our matrix product against float64, in every layout, and the order of its sums."""

from __future__ import annotations

import itertools
import platform
from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import product as module
from mpitrain.kernels.product import product

SIZES = [(8, 32, 16), (1, 1, 1), (9, 49, 257), (16, 96, 256), (7, 47, 255), (40, 1100, 3), (33, 530, 513), (64, 600, 520)]
compiled = module.native.host()
fuses = platform.machine() != "x86_64" or b" fma " in native._cpu_features()
needs_compiler = pytest.mark.skipif(compiled is None, reason=f"no compiled version: {native.missing()}")


def matrix(rows: int, columns: int, dtype: str, turned: bool, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((columns, rows)).T if turned else rng.standard_normal((rows, columns))).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_every_layout_and_size_equals_float64(size: tuple[int, int, int], dtype: str) -> None:
    assert compiled is not None
    m, n, k = size
    for left, right, with_bias, with_out in itertools.product((False, True), repeat=4):
        x, y = matrix(m, k, dtype, left, 1), matrix(k, n, dtype, right, 2)
        bias = np.random.default_rng(3).standard_normal(n).astype(dtype) if with_bias else None
        out = np.full((m, n), np.nan, dtype) if with_out else None
        found = compiled(x, y, bias, out)
        wanted = x.astype(np.float64) @ y.astype(np.float64) + (0 if bias is None else bias)
        assert found is out or out is None
        bound = (k + 2) * np.finfo(dtype).eps * (np.abs(x).astype(np.float64) @ np.abs(y).astype(np.float64) + 1 + np.abs(wanted))
        assert (np.abs(found - wanted) <= bound).all()


@needs_compiler
def test_a_row_has_the_same_bits_in_any_batch_and_any_layout() -> None:
    assert compiled is not None
    x, y = matrix(65, 700, "float32", False, 1), matrix(700, 530, "float32", False, 2)
    whole = compiled(x, y, None, None)
    for rows in (1, 8, 13, 64):
        assert compiled(x[:rows], y, None, None).tobytes() == whole[:rows].tobytes()
    assert compiled(np.asfortranarray(x), np.asfortranarray(y), None, None).tobytes() == whole.tobytes()
    columns = np.ascontiguousarray(y[:, 40:90])
    assert compiled(x, columns, None, None).tobytes() == np.ascontiguousarray(whole[:, 40:90]).tobytes()


@needs_compiler
@pytest.mark.skipif(not fuses, reason="this CPU has no fused multiply-add")
def test_sums_are_blocks_of_256_terms_in_order() -> None:
    """The law that makes the bits: fused multiply-adds in order within a block, the blocks added in order, then the bias."""
    assert compiled is not None
    x, y = matrix(9, 600, "float32", False, 1), matrix(600, 50, "float32", False, 2)
    bias = matrix(1, 50, "float32", False, 3)[0]
    wanted = np.zeros((9, 50), np.float32)
    for start in range(0, 600, 256):
        block = np.zeros((9, 50), np.float32)
        for k in range(start, min(start + 256, 600)):          # a float64 sum of an exact product rounds once, but for ties
            block = (block.astype(np.float64) + x[:, k, None].astype(np.float64) * y[k].astype(np.float64)).astype(np.float32)
        wanted = wanted + block if start else block
    assert compiled(x, y, bias, None).tobytes() == (wanted + bias).tobytes()


def test_nan_and_infinity_stay_in_their_rows_and_columns() -> None:
    x, y = matrix(10, 300, "float32", False, 1), matrix(300, 50, "float32", False, 2)
    x[3, 7], y[299, 49] = np.nan, np.inf
    for version in (module.native.reference, compiled):
        if version is not None:
            found = version(x, y, None, None)
            touched = np.zeros((10, 50), bool)
            touched[3], touched[:, 49] = True, True
            assert (np.isfinite(found) == ~touched).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_several_blas_threads_are_not_replaced_by_one_of_ours(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "one_thread", lambda: threads == 1)
    monkeypatch.setattr(module, "native", lambda *arguments: calls.append(arguments))
    product(np.zeros((128, 128), np.float32), np.zeros((128, 128), np.float32))
    assert len(calls) == (1 if threads == 1 else 0)


@pytest.mark.parametrize("x, y", [
    (np.zeros((4, 4096), np.float32), np.zeros((4096, 256), np.float32)),                     # few rows
    (np.zeros((256, 256), np.float32)[:, ::2], np.zeros((128, 256), np.float32)),             # gaps
    (np.zeros((256, 256), np.float32), np.zeros((256, 256), np.float64)),                     # two dtypes
    (np.zeros((256, 256), np.int64), np.zeros((256, 256), np.int64)),
    (np.zeros((128, 0), np.float32), np.zeros((0, 128), np.float32))])
def test_what_it_is_not_made_for_is_left_to_numpy(x: np.ndarray, y: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_thread", lambda: True)
    monkeypatch.setattr(module, "native", None)
    assert product(x, y).shape == (len(x), y.shape[1])
