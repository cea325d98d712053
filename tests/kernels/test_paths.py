"""The three kinds of kernels: C, loops of Numba, NumPy; which is used, and that Numba's are what they should be."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.errors import ConfigError
from mpitrain.kernels import KERNELS, pointwise, rows
from mpitrain.kernels import kernel as module


def test_a_loop_of_numba_takes_arrays_that_are_read_only() -> None:
    x = np.ones((4, 5), np.float32)
    x.flags.writeable = False
    for kernel in (rows.softmax, pointwise.sigmoid):
        version = kernel.numba()
        assert version is not None and version(x).shape == (4, 5)


def chosen(word: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a program says kernels run as, and whether Numba was imported for it."""
    code = ("import sys, numpy as np; from mpitrain import ops; from mpitrain.kernels.kernel import kind\n"
            "ops.gelu(np.ones(3, np.float32)); print(kind(), 'numba' in sys.modules)")
    settings = {**os.environ, **environment}
    settings.pop("MPITRAIN_KERNELS", None)
    return subprocess.run([sys.executable, "-c", code], env=settings | ({"MPITRAIN_KERNELS": word} if word else {}),
                          capture_output=True, text=True)


def test_the_variable_chooses_and_numba_is_imported_where_it_is_used_alone() -> None:
    assert [chosen(word).stdout.split() for word in ("numba", "numpy")] == [["numba", "True"], ["numpy", "False"]]
    assert chosen("", CC="", PATH="/nowhere").stdout.split() == ["numba", "True"], "without a compiler"
    if native.compiler() is not None:
        assert chosen("").stdout.split() == ["c", "False"]


def test_another_word_is_refused_in_one_line() -> None:
    last = chosen("numbers").stderr.splitlines()[-1]
    assert last == 'mpitrain.errors.ConfigError: MPITRAIN_KERNELS is "numbers" (did you mean "numba"?)'


def test_c_is_refused_where_there_is_no_compiler_and_numba_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "wanted", lambda: "c")
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(native, "_missing", {})
    with pytest.raises(ConfigError, match=r"^MPITRAIN_KERNELS=c, but no C compiler .*; install one, or set CC .* or unset M"):
        native.load.__wrapped__("rows")
    monkeypatch.setattr(module, "wanted", lambda: "numba")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^MPITRAIN_KERNELS=numba, but Numba is not installed; pip install numba, or unset"):
        module.has_numba.__wrapped__()


def test_the_versions_of_a_kernel_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(c: bool, numba: bool) -> object:
        made = module.Kernel("of_this_test", lambda x: "numpy", lambda: (lambda x: "c") if c else None,
                             lambda: (lambda x: "numba") if numba else None)
        del KERNELS["of_this_test"]
        return made(np.zeros(1))
    monkeypatch.setattr(module, "has_numba", lambda: True)
    assert [kernel(True, True), kernel(False, True), kernel(False, False)] == ["c", "numba", "numpy"]
    monkeypatch.setattr(module, "has_numba", lambda: False)
    assert kernel(False, True) == "numpy"
