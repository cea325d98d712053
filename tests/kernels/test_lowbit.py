"""Products with weights in few bits: C, Numba and NumPy, with and without the CPU's dot products, in any batch: equal bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import lowbit
from mpitrain.kernels.kernel import has_numba
from mpitrain.shrink.formats import FORMATS

SIZES = [(m, n, k) for m in (0, 1, 2, 7, 8) for n in (1, 5, 65) for k in (1, 31, 33, 63, 65, 127, 300)]
SIZES += [(131, 9, 801), (3, 8, 1701), (130, 17, 3137)]          # several blocks of rows, and parts of a sum


def versions(kernel: Any) -> Iterator[tuple[str, Any]]:
    if native.load("lowbit") is not None:
        yield "C", kernel.host()
    if has_numba() and kernel.numba() is not None:
        yield "Numba", kernel.numba()


def example(m: int, n: int, k: int, name: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(m + 10 * n + 1000 * k)
    x, weight = rng.normal(size=(m, k)).astype(np.float32), rng.normal(size=(n, k)).astype(np.float32)
    arrays = FORMATS[name]().quantize(weight)
    return x, arrays["weight"], arrays["scale"], rng.normal(size=n).astype(np.float32)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_products_of_whole_numbers_have_equal_bits_in_all_versions(name: str) -> None:
    unit, product = (lowbit.VECTOR, lowbit.int8_integers) if name == "int8" else (lowbit.SPAN, lowbit.int4_integers)
    for size in SIZES:
        x, w, scale, bias = example(*size, name)
        wanted = lowbit.rows.reference(x, unit, -1.0)
        for which, run in versions(lowbit.rows):
            for a, b in zip(run(x, unit, -1.0), wanted, strict=True):
                assert a.tobytes() == b.tobytes(), (which, size)
        for added in (bias, None):
            y = product.reference(*wanted, w, scale, added)
            for which, run in versions(product):
                assert run(*wanted, w, scale, added).tobytes() == y.tobytes(), (which, size)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_they_are_what_the_whole_numbers_say(name: str) -> None:
    x, w, scale, bias = example(8, 65, 300, name)
    unit, product = (lowbit.VECTOR, lowbit.int8_integers) if name == "int8" else (lowbit.SPAN, lowbit.int4_integers)
    q, of_x, sums = lowbit.rows(x, unit, -1.0)
    weight = FORMATS[name]().dequantize({"weight": w, "scale": scale}, 300).astype(np.float64)
    law = (q[:, :300].astype(np.float64) * of_x[:, None]) @ weight.T + bias
    assert np.abs(product(q, of_x, sums, w, scale, bias) - law).max() < 2e-6 * np.abs(law).max()
    assert np.abs(q[:, :300] * of_x[:, None] - x).max() <= 0.5001 * of_x.max()


def test_the_largest_sums_are_exact() -> None:
    k = 1 << 16
    q, w = np.full((1, k), -127, np.int8), np.full((5, k), 127, np.int8)
    one = np.ones(5, np.float32)
    y = lowbit.int8_integers(q, one[:1], q.sum(axis=1, dtype=np.int32), w, one, None)
    assert (y == np.float32(-127 * 127 * k)).all()


@pytest.mark.parametrize("row", [[np.nan, 1], [np.inf, 1], [0, 0], [1e-40, -1e-44], [3e38, -3e38], [127.5, 126.5], [-0.0, 1]])
@pytest.mark.parametrize("given", [-1.0, 0.5, 0.0])
def test_rows_of_all_kinds(row: list[float], given: float) -> None:
    x = np.array([row, [1, 2]], np.float32)
    wanted = lowbit.rows.reference(x, 4, given)
    for which, run in versions(lowbit.rows):
        for a, b in zip(run(x, 4, given), wanted, strict=True):
            assert a.tobytes() == b.tobytes(), which
    assert np.isnan(wanted[1][0]) == (not np.isfinite(x[0]).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_products_of_floats_are_close_to_the_expression_and_alike_in_any_batch(name: str) -> None:
    product = getattr(lowbit, name)
    for m, n, k in SIZES:
        x, w, scale, bias = example(m, n, k, name)
        y, law = product(x, w, scale, bias), product.reference(x.astype(np.float64), w, scale, bias)
        assert y.shape == (m, n) and np.abs(y - law).max(initial=0) <= 1e-5 * max(1, np.abs(law).max(initial=0))
        if native.load("lowbit") is not None:
            assert all(product(x[i:i + 1], w, scale, bias).tobytes() == y[i].tobytes() for i in range(m)), (m, n, k)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("without", ["-mno-avx512vnni", "-mno-avx512f"])
def test_other_cpus_give_the_same_bits(without: str, tmp_path: Path) -> None:
    """The library as a CPU without dot products, or with AVX2 alone, has it."""
    if native.load("lowbit") is None:
        pytest.skip("no C library")
    made = tmp_path / "lowbit.so"
    subprocess.run(["gcc", *native.FLAGS, without, "-o", made, native.source_folder() / "lowbit.c", "-lm"], check=True)
    other = ctypes.CDLL(str(made))

    def call(function: str) -> Any:
        return lambda *arguments: getattr(other, function)(*[
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else None if a is None else
            ctypes.c_double(a) if isinstance(a, float) else ctypes.c_int64(a) for a in arguments])
    for m, n, k in SIZES:
        for name, unit in (("int8", lowbit.VECTOR), ("int4", lowbit.SPAN)):
            x, w, scale, bias = example(m, n, k, name)
            found = getattr(lowbit, f"_{name}_host").body(call(f"lowbit_{name}"), x, w, scale, bias)
            assert found.tobytes() == getattr(lowbit, name)(x, w, scale, bias).tobytes(), (name, m, n, k)
            given = lowbit._rows_host.body(call("lowbit_rows"), x, unit, -1.0)
            found = getattr(lowbit, f"_{name}_integers_host").body(call(f"lowbit_{name}_integers"), *given, w, scale, bias)
            assert found.tobytes() == getattr(lowbit, f"{name}_integers")(*given, w, scale, bias).tobytes(), (name, m, n, k)
