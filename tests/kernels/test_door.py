"""The door to C: no call, however wrong, reads or writes outside of its arrays (benchmarks/kernel_fuzz.py calls many more)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import library
from mpitrain.kernels.kernel import kind
from mpitrain.kernels.library import Slot, bind, slots_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kernel_fuzz import Guarded, fuzz

pytestmark = pytest.mark.skipif(kind() != "c", reason="the door is that of C; the loops of Numba check dtypes alone")


def test_wrong_calls_end_in_results_or_exceptions() -> None:
    counts, deaths = fuzz(4000, 0, [])
    assert deaths == []
    assert min(counts.values()) > 1000 and sum(counts.values()) == 4000


def test_a_number_outside_of_its_array_ends_the_fuzz() -> None:
    """Or else it would find nothing: these calls of C are handed one number less than they read or write."""
    source = ("import sys; sys.path[:0] = sys.argv[1:]; from kernel_fuzz import Guarded; import ctypes, numpy as np;"
              "from mpitrain.backend import native; x = Guarded().empty(512, np.float32); x[...] = 1;"
              "native.load('pointwise').relu_float32(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(x.ctypes.data),"
              " ctypes.c_int64(x.size + 1))")
    if native.load("pointwise") is None:
        pytest.skip("no C compiler")
    ran = subprocess.run([sys.executable, "-c", source, str(Path(library.__file__).parents[2] / "benchmarks")], check=False)
    assert ran.returncode < 0


def test_memory_between_guards_ends_where_they_begin() -> None:
    memory = Guarded()
    x = memory.empty((3, 5), np.float64)
    assert (x.ctypes.data + x.nbytes) % 4096 == 0
    memory.ends = False
    assert memory.empty((3, 5), np.float64).ctypes.data % 4096 == 0


def test_a_signature_says_what_each_place_takes() -> None:
    assert slots_of("X:nm X!:n D?:n/8+2m in im d i") == (
        Slot("X", size="de"), Slot("X", written=True, size="d"), Slot("D", optional=True, size="d/8+2e"), Slot("i"), Slot("i"),
        Slot("d"), Slot("i"))
    for wrong in ("X:n", "p i", "Xn in", "X?!n"):
        with pytest.raises((AssertionError, KeyError)):
            slots_of(wrong)


@pytest.fixture(params=["builtin", "ctypes"])
def relu(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "ctypes":
        monkeypatch.setattr(library, "_builtin", lambda: None)
    elif library._builtin() is None:
        pytest.skip("no builtin on this machine")
    return bind("pointwise", "relu", "X:n X!:n in") or pytest.skip("no C compiler")


FIVE = np.zeros(5, np.float32)
LOCKED = np.zeros(5, np.float32)
LOCKED.flags.writeable = False
WRONG: dict[str, tuple[Any, str]] = {
    "the other precision": ((FIVE, np.zeros(5), 5), "argument 1 has another dtype"),
    "integers": ((np.zeros(5, np.int32), FIVE, 5), "argument 0 has another dtype"),
    "other byte order": ((FIVE.astype(">f4"), FIVE, 5), "argument 0 has another dtype"),
    "none": ((FIVE, None, 5), "argument 1 has another dtype"), "a number": ((FIVE, 5, 5), "argument 1 has another dtype"),
    "too short": ((FIVE, FIVE, 6), "argument 0 has 5 numbers, and those of the call say"),
    "a negative size": ((FIVE, FIVE, -1), "argument 0 has 5 numbers"),
    "huge": ((FIVE, FIVE, 1 << 62), "argument 0 has 5 numbers"),
    "read-only": ((FIVE, LOCKED, 5), "argument 1 is an array .*read-only"),
    "gaps": ((FIVE[::2], FIVE, 3), "array with gaps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_the_signature_is_refused(relu: Any, name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=f"relu: .*{message}"):
        relu(*arguments)


def test_a_dtype_object_of_its_own_is_as_good(relu: Any) -> None:
    """Its object is not the one that nearly all arrays share."""
    dtype = np.dtype(np.float32).newbyteorder("S").newbyteorder("S")
    x = np.frombuffer(np.full(5, -1, np.float32).tobytes(), dtype).copy()
    relu(x, x, 5)
    assert not x.any()


@pytest.mark.parametrize(("kernel", "index"), [("scatter_add_rows", -1), ("scatter_add_rows", 7), ("cross_entropy", 37)])
def test_an_index_outside_is_an_error(kernel: str, index: int) -> None:
    from kernel_examples import EXAMPLES

    from mpitrain.kernels import KERNELS, rows
    assert rows
    arguments = list(EXAMPLES[kernel].arguments(np.random.default_rng(0), np.dtype(np.float32)))
    arguments[1] = arguments[1].copy()
    arguments[1][3] = index
    if index >= 0 or KERNELS[kernel].host() is not None:
        with pytest.raises(IndexError):
            KERNELS[kernel](*arguments)
