"""The builtin that calls C functions: what it hands over, what it refuses, and that it lets arrays go."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from c_library import compiled

from mpitrain.backend import native
from mpitrain.kernels import library

MIXED = "pidipidiiiiiiidiiid"                     # 15 integers, and 4 doubles among them
SOURCE = """
#include <stdint.h>
#define PROBE(T, NAME)                                                                                                        \\
int mixed_##NAME(T *out, int64_t a, double b, int64_t c, T *from, int64_t d, double e, int64_t f, int64_t g, int64_t h,       \\
                 int64_t i, int64_t j, int64_t k, int64_t l, double m, int64_t n, int64_t o, int64_t p, double q)             \\
{                                                                                                                             \\
    double all[] = {a, b, c, from ? from[0] : -1, d, e, f, g, h, i, j, k, l, m, n, o, p, q};                                  \\
    for (int at = 0; at < 18; at++) out[at] = (T)all[at];                                                                     \\
    return 1;                                                                                                                 \\
}
PROBE(float, float32)
PROBE(double, float64)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("probe"), SOURCE)


@pytest.fixture(params=["builtin", "ctypes"])
def bound(request: Any, probe: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    load = native.load
    monkeypatch.setattr(native, "load", lambda name: probe if name == "probe" else load(name))
    if request.param == "ctypes":
        monkeypatch.setattr(library, "_builtin", lambda: None)
    elif library._builtin() is None:
        pytest.skip("no builtin on this machine")
    return library.bind


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_integers_doubles_and_arrays_arrive_in_their_places(bound: Any, dtype: str) -> None:
    call = bound("probe", "mixed", MIXED)
    out, given = np.zeros(18, dtype), np.full(1, 7, dtype)
    numbers = [1, 2.5, 3, given, 5, 6.5, *range(7, 14), 14.5, 15, 16, 17, 18.5]
    call(out, *numbers)
    assert out.tolist() == [7 if x is given else x for x in numbers]
    call(out, *(None if x is given else x for x in numbers))
    assert out[3] == -1


def test_arrays_are_let_go_again(bound: Any) -> None:
    call, out, given = bound("probe", "mixed", MIXED), np.zeros(18), np.ones(1)
    before = sys.getrefcount(out), sys.getrefcount(given)
    for _ in range(100):
        call(out, 1, 2.0, 3, given, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)
    assert (sys.getrefcount(out), sys.getrefcount(given)) == before
    out.resize(20)                                # refused while somebody looks at the memory


def test_one_where_memory_ran_out_is_an_error(bound: Any) -> None:
    with pytest.raises(MemoryError, match="no memory for packed copies"):
        bound("probe", "mixed", MIXED, True)(np.zeros(18), 1, 2.0, 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)


def test_memory_with_gaps_and_what_is_no_number_are_refused(bound: Any) -> None:
    call = bound("probe", "mixed", MIXED)
    with pytest.raises(ValueError, match="array with gaps"):
        call(np.zeros(36)[::2], 1, 2.0, 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        call(np.zeros(18), "1", 2.0, 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        call(np.zeros(18), 1, "2", 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)
    with pytest.raises(TypeError):
        call(np.zeros(18), 1)


def test_a_first_array_of_another_dtype_is_refused(bound: Any) -> None:
    for array in (np.zeros(18, "int32"), np.zeros(18, ">f4"), np.zeros(18, "float16")):
        with pytest.raises((TypeError, KeyError)):
            bound("probe", "mixed", MIXED)(array, 1, 2.0, 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0)
