"""The builtin that calls C functions: what it hands over, what it refuses, and that it lets arrays go."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from c_library import compiled

from mpitrain.backend import native
from mpitrain.kernels import library

MIXED = "X!:18 i d i X?:1 i d" + 7 * " i" + " d i i i d"        # 15 integers, and 4 doubles among them
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


REST = [1, 2.0, 3, None, 5, 6.0, *range(7), 1.0, 2, 3, 4, 5.0]


@pytest.mark.parametrize("first", [np.zeros(18, "int32"), np.zeros(18, ">f4"), np.zeros(18, "float16"), None])
def test_a_first_array_of_another_dtype_and_none_are_refused(bound: Any, first: Any) -> None:
    with pytest.raises(TypeError, match="argument 0 has another dtype than it is taken for"):
        bound("probe", "mixed", MIXED)(first, *REST)


def unaligned(dtype: str) -> np.ndarray:
    """18 zeros that begin a byte behind where they may."""
    return np.zeros(18 * 8 + 1, np.uint8)[1:1 + 18 * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize("place", [0, 4])
def test_numbers_that_are_not_aligned_are_refused(bound: Any, place: int) -> None:
    arguments = [np.zeros(18), *REST]
    arguments[place] = unaligned("float64")
    with pytest.raises((ValueError, TypeError), match=r"not aligned|another dtype"):
        bound("probe", "mixed", MIXED)(*arguments)


WRONG: list[Any] = [None, "text", b"bytes", 2.5, [1, 2], object(), np.float32(3), 1 << 63, -(1 << 70), np.zeros(0), np.zeros(()),
                    np.zeros((3, 4)).T, np.zeros(9)[::3], np.zeros(5)[::-1], np.broadcast_to(np.zeros(1), 4), np.zeros(3, object),
                    np.zeros(3, "S5"), unaligned("float32"), memoryview(b"abcdefgh"), float("nan"), True, -1, range(3)]


def test_whatever_it_is_called_with_it_answers_or_raises_and_keeps_nothing(bound: Any) -> None:
    """Random arguments of all kinds: in place of numbers, of arrays, too many and too few."""
    call, rng, raised = bound("probe", "mixed", MIXED), np.random.default_rng(0), 0
    right = [np.zeros(18), *REST]
    counted = [x for x in (*WRONG, *right) if x is not None and not isinstance(x, int)]      # those are everybody's
    gc.collect()
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(3000):
        arguments = list(right)
        for place in rng.integers(0, len(right), rng.integers(1, 4)):
            arguments[place] = WRONG[rng.integers(len(WRONG))]
        if rng.random() < 0.1:
            del arguments[rng.integers(len(arguments)):]
        try:
            assert call(*arguments) is None
        except (TypeError, ValueError, OverflowError, IndexError, ctypes.ArgumentError):
            raised += 1
        arguments.clear()
    assert 1000 < raised < 3000
    gc.collect()                                      # what earlier failures still held goes before and after
    after = [sys.getrefcount(x) for x in counted]
    assert [b - a for a, b in zip(before, after) if abs(b - a) > 20] == []


def test_another_thread_runs_while_c_does_and_none_can_take_the_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        #include <stdint.h>
        #include <stdatomic.h>
        _Atomic int inside, leave;
        int inside_now(void) { return inside; }
        void let_go(void) { leave = 1; }
        void wait_float32(float *x, int64_t n) { inside = 1; while (!leave) {} for (int64_t i = 0; i < n; i++) x[i] = 1; }
        void wait_float64(double *x, int64_t n) { }
    """
    waiting, load = compiled(tmp_path, source), native.load
    monkeypatch.setattr(native, "load", lambda name: waiting if name == "waiting" else load(name))
    if library._builtin() is None:
        pytest.skip("no builtin on this machine")
    call, x = library.bind("waiting", "wait", "X!:n in"), np.zeros(1000, np.float32)
    assert call is not None
    thread = threading.Thread(target=call, args=(x, x.size))
    thread.start()
    while not waiting.inside_now():
        pass
    with pytest.raises(ValueError, match="resize"):
        x.resize(10)
    waiting.let_go()
    thread.join()
    assert x.all()
