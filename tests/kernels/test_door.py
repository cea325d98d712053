"""The door to C and to loops of Numba: no call, however wrong, reads or writes outside of its arrays (benchmarks/kernel_fuzz.py
calls many more)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_examples import EXAMPLES

from mpitrain.backend import native
from mpitrain.kernels import KERNELS, library, rows
from mpitrain.kernels.door import Slot, slots_of
from mpitrain.kernels.kernel import has_numba, kind
from mpitrain.kernels.library import bind

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kernel_fuzz import Guarded, fuzz

COMPILED = [word for word in ("c", "numba") if word == kind() or (word == "numba" and has_numba())]


@pytest.mark.timeout(600)                         # where nothing is compiled yet, Numba takes minutes
@pytest.mark.skipif(kind() not in COMPILED, reason="NumPy's expressions have no door")
def test_wrong_calls_end_in_results_or_exceptions() -> None:
    """Of C in `make test`, of Numba's loops in `make test-kernels`."""
    calls = 3000
    counts, deaths = fuzz(calls, 0, [], kind())
    assert deaths == []
    assert min(counts.values()) > calls / 4 and sum(counts.values()) == calls


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
    x = memory.empty((3, 5), np.float64)
    assert x.ctypes.data % 4096 == 0 and memory.is_whole()
    np.lib.stride_tricks.as_strided(x, (16,), (8,))[15] = 0
    assert not memory.is_whole(), "a byte beside an array has changed"


def test_a_signature_says_what_each_place_takes() -> None:
    assert slots_of("X:nm X!:n D?:n/8+2m in im d i") == (
        Slot("X", size="de"), Slot("X", written=True, size="d"), Slot("D", optional=True, size="d/8+2e"), Slot("i"), Slot("i"),
        Slot("d"), Slot("i"))
    for wrong in ("X:n", "p i", "Xn in", "X?!n"):
        with pytest.raises((AssertionError, KeyError)):
            slots_of(wrong)


@pytest.fixture(params=["builtin", "ctypes", "numba"])
def relu(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's function as its body calls it: (x, y, how many)."""
    if request.param == "numba":
        if not has_numba():
            pytest.skip("no Numba here")
        from mpitrain.kernels.loops import pointwise, typed
        return typed.loop("X:n X!:n in", name="relu")(pointwise.relu)
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
    "one argument more": ((FIVE, FIVE, 5, 5), "called with another number"),
    "huge": ((FIVE, FIVE, 1 << 62), "argument 0 has 5 numbers"),
    "read-only": ((FIVE, LOCKED, 5), "argument 1 is an array .*read-only"),
    "gaps": ((FIVE[::2], FIVE, 3), "array with gaps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_the_signature_is_refused(relu: Any, name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=f"relu: .*{message}"):
        relu(*arguments)


@pytest.mark.parametrize(("size", "error"), [(2.5, TypeError), ("5", TypeError), (None, TypeError), (1 << 70, OverflowError)])
def test_an_integer_is_one_of_64_bits(relu: Any, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        relu(FIVE, FIVE.copy(), size)


def test_a_dtype_object_of_its_own_is_as_good(relu: Any) -> None:
    """Its object is not the one that nearly all arrays share."""
    dtype = np.dtype(np.float32).newbyteorder("S").newbyteorder("S")
    x = np.frombuffer(np.full(5, -1, np.float32).tobytes(), dtype).copy()
    relu(x, x, 5)
    assert not x.any()


@pytest.mark.parametrize("word", ["c", "numba", "numpy"])
@pytest.mark.parametrize(("name", "index"), [("scatter_add_rows", -1), ("scatter_add_rows", 7), ("cross_entropy", -1),
                                             ("cross_entropy", 37), ("cross_entropy_grad", 37)])
def test_an_index_outside_is_an_error(name: str, index: int, word: str) -> None:
    kernel = KERNELS[name]
    version = {"c": kernel.host if kind() == "c" else lambda: None, "numba": kernel.numba if has_numba() else lambda: None,
               "numpy": lambda: kernel.reference}[word]()
    if version is None:
        pytest.skip(f"no {word} here")
    arguments = list(EXAMPLES[name].arguments(np.random.default_rng(0), np.dtype(np.float32)))
    arguments[1] = arguments[1].copy()
    arguments[1][3] = index
    with pytest.raises(IndexError):
        version(*arguments)


@pytest.mark.parametrize("word", COMPILED)
def test_arrays_that_a_kernels_body_has_no_copy_of_are_refused(word: str) -> None:
    """Where it copied one that it writes to, what was written would be lost."""
    version = rows.cross_entropy_grad.host() if word == kind() else rows.cross_entropy_grad.numba()
    e, labels, totals, *rest = EXAMPLES["cross_entropy_grad"].arguments(np.random.default_rng(0), np.dtype(np.float32))
    assert version is not None
    for wrong in ((np.asfortranarray(e), labels, totals), (e, labels.astype(np.int32), totals), (e, labels, totals[::-1]),
                  (e, labels, totals[:-1]), (e.astype(np.float64), labels, totals), (e, labels[:-1].copy(), totals)):
        with pytest.raises((TypeError, ValueError), match="cross_entropy_grad: argument"):
            version(*wrong, *rest)
