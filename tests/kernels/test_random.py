"""The numbers that parameters begin with: the logarithm and cosine of the compiled loop, and that any slice is the same."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from c_library import compiled

from mpitrain.backend import native
from mpitrain.kernels import random

SOURCE = f"""
#include "{native.source_folder() / 'random.c'}"
void logs(double *x, i64 n) {{ for (i64 i = 0; i < n; i++) x[i] = log_of(x[i]); }}
void cosines(double *x, i64 n) {{ for (i64 i = 0; i < n; i++) x[i] = cos_of_turns(x[i]); }}
"""
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
TINY = 2.0 ** -53                                 # what all fractions are multiples of


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("random"), SOURCE)


def applied(function: ctypes._NamedFuncPointer, x: np.ndarray) -> np.ndarray:
    out = x.copy()
    function(out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size))
    return out


@needs_compiler
def test_logarithms_are_right_to_a_rounding_or_two(functions: ctypes.CDLL) -> None:
    spread = np.random.default_rng(0).random(100_000)
    x = np.concatenate([[TINY, 2 * TINY, 1 - TINY, 1.0, 0.5, 0.5 ** 0.5, np.nextafter(0.5 ** 0.5, 0), 0.25], spread + TINY,
                        2.0 ** -(53 * spread), 1 - spread * 1e-8])
    wanted = np.log(x.astype(np.longdouble))
    found = applied(functions.logs, x)
    assert (abs(found - wanted) <= 2.3e-16 * abs(wanted)).all() and found[3] == 0


@needs_compiler
def test_cosines_of_turns_are_right_to_two_roundings_of_one(functions: ctypes.CDLL) -> None:
    eighths = np.arange(8) / 8
    u = np.concatenate([eighths, eighths[1:] - TINY, eighths + TINY, [1 - TINY], np.random.default_rng(0).random(100_000)])
    wanted = np.cos(u.astype(np.longdouble) * (2 * np.arccos(np.longdouble(-1))))
    found = applied(functions.cosines, u)
    assert (abs(found - wanted) <= 2.3e-16).all()
    assert found[[0, 2, 4, 6]].tolist() == [1, 0, -1, 0]


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_any_slice_is_the_same_and_as_the_expressions_have_it(draw) -> None:
    whole = draw(7, 5, 1000, np)
    for start, stop in ((0, 1), (3, 258), (255, 257), (999, 1000), (10, 10)):
        assert np.array_equal(draw(7, 5 + start, stop - start, np), whole[start:stop])
    kernel = random.random_uniform if draw is random.uniform else random.random_normal
    assert np.array_equal(kernel.reference(np.empty(1000), 7, 5).astype(np.float32), whole.astype(np.float32))
    assert draw(7, 1 << 63, 2, np).shape == (2,)
