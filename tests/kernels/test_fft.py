"""Fourier transforms in C: as exact as NumPy's and PyTorch's, and a line has its bits wherever it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ShapeError
from mpitrain.kernels import fft, fft_plan
from mpitrain.kernels.fft import full_transform, half_transform, real_transform
from mpitrain.kernels.fft_plan import LARGEST, SIDE_BY_SIDE, plan, radices, roots, sides, suits
from mpitrain.kernels.kernel import kind

in_c = pytest.mark.skipif(kind() != "c", reason="without C they are NumPy's")
RNG = np.random.default_rng(0)
LENGTHS = [*range(1, 20), 25, 31, 32, 45, 49, 64, 85, 96, 127, 128, 180, 256, 257, 260, 289, 360, 500, 512, 513, 1000, 1024, 1155,
           2047, 2048, 4096]
COMPLEX = {"float32": np.complex64, "float64": np.complex128}


def spectrum(z: np.ndarray, axis: int = -1) -> np.ndarray:
    """In long double, where NumPy has that."""
    return np.fft.fft(z.astype(np.clongdouble), axis=axis)


def pairs(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)).astype(COMPLEX[dtype])


def error(found: Any, exact: Any) -> float:
    return float(np.linalg.norm((found - exact).ravel()) / np.linalg.norm(exact.ravel()) / np.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_rounding_error_is_that_of_pytorch_or_less(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    for n in LENGTHS:
        z = pairs(18, n, dtype=dtype)
        x, exact = z.real.copy(), spectrum(z)
        theirs = torch.fft.fft(torch.tensor(z)).numpy()
        assert error(full_transform(z, (1,), False, 1.0), exact) <= max(0.8, 1.4 * error(theirs, exact)), n
        exact = spectrum(z.conj()).conj()
        assert error(full_transform(z, (1,), True, 1.0), exact) <= max(0.8, 1.4 * error(theirs, exact)), n
        exact = spectrum(x)[:, :n // 2 + 1]
        theirs = torch.fft.rfft(torch.tensor(x)).numpy()
        found = half_transform(x, (), 1.0, 1.0)
        assert error(found, exact) <= max(0.8, 1.4 * error(theirs, exact)), n
        assert found.dtype == z.dtype and found.shape == exact.shape
        back, exact = real_transform(found, n, (), 1.0, 1.0), np.fft.irfft(found.astype(np.clongdouble), n, norm="forward")
        theirs = torch.fft.irfft(torch.tensor(found), n, norm="forward").numpy()
        assert error(back, exact) <= max(0.8, 1.4 * error(theirs, exact)), n
        assert back.dtype == x.dtype and back.shape == x.shape


@in_c
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 7, 40, 85, 256, 272, 1000, 1025])
def test_a_line_has_the_same_bits_alone_in_a_batch_and_along_any_dim(n: int, dtype: str) -> None:
    z = pairs(37, n, dtype=dtype)
    x, half = z.real.copy(), pairs(37, n // 2 + 1, dtype=dtype)
    full, spectra = full_transform(z, (1,), False, 0.3), half_transform(x, (), 0.3, 2.0)
    back = real_transform(half, n, (), 0.3, 0.5)
    columns = np.ascontiguousarray(z.T)
    assert full_transform(columns, (0,), False, 0.3).T.tobytes() == full.tobytes()
    assert full_transform(np.stack([columns, columns]), (1,), False, 0.3)[1].T.tobytes() == full.tobytes()
    assert full_transform(z[::2], (1,), False, 0.3).tobytes() == full[::2].tobytes()
    for i in (0, 15, 16, 36):
        assert full_transform(z[i:i + 1], (1,), False, 0.3).tobytes() == full[i].tobytes()
        assert half_transform(x[i:i + 1], (), 0.3, 2.0).tobytes() == spectra[i].tobytes()
        assert real_transform(half[i:i + 1], n, (), 0.3, 0.5).tobytes() == back[i].tobytes()


def test_what_is_not_finite_stays_in_its_line() -> None:
    for n in (20, 1000):
        z = pairs(20, n)
        known = full_transform(z, (1,), False, 1.0)
        z[3, 5] = np.inf
        with np.errstate(invalid="ignore"):
            found = full_transform(z, (1,), False, 1.0)
        assert not np.isfinite(found[3]).any()
        assert np.delete(found, 3, 0).tobytes() == np.delete(known, 3, 0).tobytes()


def test_several_dims_are_one_after_the_other() -> None:
    z = pairs(3, 6, 17, 20, dtype="float64")
    known = 0.5 * np.fft.ifftn(z, axes=(0, 2, 3), norm="forward")
    np.testing.assert_allclose(full_transform(z, (0, 2, 3), True, 0.5), known, atol=1e-10)
    x = z.real
    np.testing.assert_allclose(half_transform(x, (1, 2), 2.0, 1.0), 2 * np.fft.rfftn(x, axes=(1, 2, 3)), atol=1e-10)
    known = 2 * np.fft.irfftn(z, (6, 17, 39), (1, 2, 3), norm="forward")
    np.testing.assert_allclose(real_transform(z, 39, (1, 2), 2.0, 1.0), known, atol=1e-9)


@pytest.mark.parametrize("n", [131, 262, 2 * 1009])
def test_lengths_with_large_prime_factors_are_transformed_too(n: int) -> None:
    assert not suits(n) and error(full_transform(z := pairs(3, n), (1,), False, 1.0), spectrum(z)) < 2
    assert error(half_transform(z.real, (0,), 1.0, 1.0), np.fft.fft(spectrum(z.real), axis=0)[:, :n // 2 + 1]) < 2


def test_arrays_that_are_empty_swapped_or_of_another_shape() -> None:
    assert full_transform(pairs(0, 8), (1,), False, 1.0).shape == (0, 8)
    assert half_transform(np.zeros((0, 8), np.float32), (), 1.0, 1.0).shape == (0, 5)
    assert real_transform(pairs(0, 5), 8, (), 1.0, 1.0).shape == (0, 8)
    z = pairs(4, 8)
    np.testing.assert_allclose(full_transform(z.astype(">c8"), (1,), False, 1.0), np.fft.fft(z), atol=1e-4)
    with pytest.raises(ShapeError, match="do not fit"):
        real_transform(z, 16, (), 1.0, 1.0)
    if kind() == "c":
        with pytest.raises(ShapeError, match="do not fit"):
            full_transform(z, (-1,), False, 1.0)


def test_plans_hold_what_c_is_told() -> None:
    for n in (1, 2, 12, 17, 64, 96, 255, 256, 1000, 1024, 127 * 126, 1 << 20):
        n1, n2 = sides(n)
        assert n1 * n2 == n and (n1 == 1) == (n <= SIDE_BY_SIDE) and np.prod(radices(n)) == n
        assert max(radices(n), default=1) <= LARGEST and len(plan(n, True, np.dtype("f")).numbers) == 176
    for n in (1, 3, 8, 12, 1000):
        p = np.arange(2 * n)
        c, s = roots(n, p)
        np.testing.assert_allclose(c + 1j * s, np.exp(2j * np.pi * p / n), atol=3e-15)
    assert [set(np.abs(part)) for part in roots(4, np.arange(4))] == [{0.0, 1.0}, {0.0, 1.0}]


def test_plans_are_kept_up_to_a_number_of_bytes_and_the_last_used_ones(monkeypatch: Any) -> None:
    monkeypatch.setattr(fft_plan, "_kept", {})
    sizes = {n: plan(n, False, np.dtype("d")).nbytes for n in (64, 1000, 128, 4096)}
    monkeypatch.setattr(fft_plan, "MOST_KEPT", sizes[64] + sizes[128] + sizes[4096])
    first = plan(64, False, np.dtype("d"))
    plan(2, False, np.dtype("d"))
    assert plan(64, False, np.dtype("d")) is first and [n for n, _, _ in fft_plan._kept] == [4096, 2, 64]
    plan(1 << 14, False, np.dtype("d"))                        # above the bound alone
    assert [n for n, _, _ in fft_plan._kept] == [1 << 14]


@in_c
def test_working_memory_that_is_too_small_does_not_pass_the_door(monkeypatch: Any) -> None:
    monkeypatch.setattr(fft, "_memory", lambda nbytes: np.empty(nbytes - 1, np.uint8))
    for transform in (lambda: full_transform(pairs(2, 64), (1,), False, 1.0),
                      lambda: half_transform(np.zeros((2, 64), "f"), (), 1.0, 1.0),
                      lambda: real_transform(pairs(2, 33), 64, (), 1.0, 1.0)):
        with pytest.raises((ShapeError, ValueError)):
            transform()
