"""Our matrix product against float64, in every layout, and the order of its sums."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import psutil
import pytest
import threadpoolctl

from mpitrain.backend import native
from mpitrain.kernels import product as module
from mpitrain.kernels.library import bind
from mpitrain.kernels.product import product
from mpitrain.train.machine.threads import pin

SIZES = [(8, 32, 16), (1, 1, 1), (9, 49, 257), (16, 96, 256), (7, 47, 255), (40, 1100, 3), (33, 530, 513), (64, 600, 520),
         (15, 33, 1200), (65, 65, 384), (20, 17, 9), (0, 40, 16), (8, 0, 16), (16, 64, 40), (17, 50, 1024),
         (80, 176, 800), (8, 16, 400)]
compiled = module.native.host()
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
@pytest.mark.parametrize("rows", [16, 48, 80, 96])
def test_few_rows_times_contiguous_columns_have_the_bits_of_the_other_layout(rows: int) -> None:
    """Their product is computed turned: 16 rows of it or more, a multiple, and at least twice as many columns."""
    assert compiled is not None
    for terms in (50, 800, 1024):
        x, y = matrix(rows, terms, "float32", False, 1), matrix(terms, 192, "float32", True, 2)
        bias = matrix(1, 192, "float32", False, 3)[0]
        for left in (x, np.asfortranarray(x)):
            for added in (None, bias):
                assert compiled(left, y, added, None).tobytes() == compiled(x, np.ascontiguousarray(y), added, None).tobytes()


def fuses() -> bool:
    """Whether what was compiled rounds a product and a sum once: 2**-24 is lost otherwise."""
    assert compiled is not None
    x, y = np.array([[1, 1 + 2**-12]], np.float32), np.array([[-1 - 2**-11], [1 + 2**-12]], np.float32)
    return bool(compiled(x, y, None, None)[0, 0] == np.float32(2**-24))


@needs_compiler
@pytest.mark.skipif(compiled is not None and not fuses(), reason="compiled for a CPU without fused multiply-add")
def test_sums_are_even_blocks_of_at_most_384_terms_in_order() -> None:
    """The law that makes the bits: fused multiply-adds in order within a block, the blocks added in order, then the bias."""
    assert compiled is not None
    x, y = matrix(9, 600, "float32", False, 1), matrix(600, 50, "float32", False, 2)
    bias = matrix(1, 50, "float32", False, 3)[0]
    wanted = np.zeros((9, 50), np.float32)
    for start in (0, 304):                                     # half of 600, as a multiple of 8
        block = np.zeros((9, 50), np.float32)
        for k in range(start, min(start + 304, 600)):          # a float64 sum of an exact product rounds once, but for ties
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


@pytest.mark.parametrize("one_thread, is_fast", [(True, True), (False, True), (True, False)])
def test_ours_is_taken_where_blas_has_one_thread_on_a_cpu_that_suits(one_thread: bool, is_fast: bool,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "one_thread", lambda: one_thread)
    monkeypatch.setattr(module, "is_fast", lambda: is_fast)
    monkeypatch.setattr(module, "native", lambda *arguments: calls.append(arguments))
    product(np.zeros((128, 128), np.float32), np.zeros((128, 128), np.float32))
    assert len(calls) == (1 if one_thread and is_fast else 0)


@needs_compiler
def test_ours_is_the_faster_with_512_bit_vectors() -> None:
    with open("/proc/cpuinfo") as file:
        assert module.is_fast() == ("avx512f" in file.read())


@pytest.mark.parametrize("x, y", [
    (np.zeros((4, 4096), np.float32), np.zeros((4096, 256), np.float32)),                     # few rows
    (np.zeros((96, 96), np.float32), np.zeros((96, 96), np.float32)),                         # little work
    (np.zeros((256, 256), np.float32)[:, ::2], np.zeros((128, 256), np.float32)),             # gaps
    (np.zeros((256, 256), np.float32), np.zeros((256, 256), np.float64)),                     # two dtypes
    (np.zeros((256, 256), np.int64), np.zeros((256, 256), np.int64)),
    (np.zeros((256, 256), np.longdouble), np.zeros((256, 256), np.longdouble)),
    (np.zeros((256, 256), ">f4"), np.zeros((256, 256), ">f4")),
    (np.zeros((256, 256), np.float32), np.ma.zeros((256, 256), np.float32)),
    (np.zeros((128, 0), np.float32), np.zeros((0, 128), np.float32))])
def test_what_it_is_not_made_for_is_left_to_numpy(x: np.ndarray, y: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_thread", lambda: True)
    monkeypatch.setattr(module, "is_fast", lambda: True)
    monkeypatch.setattr(module, "native", None)
    assert product(x, y).shape == (len(x), y.shape[1])


@pytest.mark.parametrize("bias", [np.arange(64), np.arange(64) % 2 == 0, np.arange(128.0)[::2], np.arange(64.0)[::-1],
                                  np.broadcast_to(np.float32(3), (64,)), np.eye(64)[3]])
def test_a_bias_of_any_type_and_stride_is_added_as_numpy_adds_it(bias: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_thread", lambda: True)
    monkeypatch.setattr(module, "is_fast", lambda: True)
    x, y = np.ones((256, 256), np.float32), np.ones((256, 64), np.float32)
    assert (product(x, y, bias.astype(np.float32) if bias.dtype == np.float64 else bias) == 256 + bias).all()


@pytest.mark.parametrize("out", [np.zeros((256, 256)), np.zeros((128, 512), np.float32),
                                 np.zeros((256, 512), np.float32)[:, ::2]])
def test_an_out_that_does_not_fit_is_left_to_numpy_to_refuse_or_fill(out: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_thread", lambda: True)
    monkeypatch.setattr(module, "is_fast", lambda: True)
    monkeypatch.setattr(module, "native", None)
    x = np.ones((256, 256), np.float32)
    if out.shape == x.shape:
        assert (product(x, x, out=out) == 256).all()
    else:
        with pytest.raises(ValueError, match="shape|dimension"):
            product(x, x, out=out)


def test_a_read_only_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_thread", lambda: True)
    monkeypatch.setattr(module, "is_fast", lambda: True)
    x, out = np.ones((256, 256), np.float32), np.zeros((256, 256), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        product(x, x, out=out)


@needs_compiler
def test_the_bridge_to_c_refuses_an_array_with_gaps() -> None:
    call = bind("product", "product", module.SIGNATURE)
    assert call is not None
    with pytest.raises(ValueError, match="array with gaps"):
        call(np.zeros((4, 4), np.float32)[:, ::2], *[np.zeros(1, np.float32)] * 4, *[0] * 7)


@needs_compiler
def test_no_terms_leave_the_bias() -> None:
    assert compiled is not None
    bias = np.arange(40, dtype=np.float32)
    assert (compiled(np.zeros((9, 0), np.float32), np.zeros((0, 40), np.float32), bias, None) == bias).all()


@needs_compiler
def test_threads_have_memory_of_their_own_and_give_it_back() -> None:
    assert compiled is not None
    x = matrix(64, 300, "float32", False, 1)
    y = matrix(300, 64, "float32", False, 2)
    wanted, seen = compiled(x, y, None, None).tobytes(), []

    def work() -> None:
        seen.append(all(compiled(x, y, None, None).tobytes() == wanted for _ in range(20)))
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 6
    before = psutil.Process().memory_info().rss
    for _ in range(200):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert psutil.Process().memory_info().rss - before < 50 << 20            # 0.5 MiB each would be 100


def test_pinning_threads_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [{"user_api": "blas", "num_threads": 4}])
    module.one_thread.cache_clear()
    assert not module.one_thread()
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [{"user_api": "blas", "num_threads": 1}])
    with threadpoolctl.threadpool_limits(None):
        pin(1)
        assert module.one_thread()
    module.one_thread.cache_clear()


def test_blas_has_its_threads_again_when_the_last_has_left() -> None:
    def counts() -> set[int]:
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    with threadpoolctl.threadpool_limits(2):
        module.one_thread.cache_clear()
        first, second = module.one_thread_inside(), module.one_thread_inside()
        first.__enter__()
        second.__enter__()
        assert counts() == {1} and module.one_thread()
        first.__exit__(None, None, None)
        assert counts() == {1} and module.one_thread()
        second.__exit__(None, None, None)
        assert counts() == {2} and not module.one_thread()
    module.one_thread.cache_clear()
