"""Every kernel of the package against the plain-array expression that defines it."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from kernel_examples import EXAMPLES

import mpitrain.kernels
from mpitrain.backend import native
from mpitrain.kernels import KERNELS, Kernel
from mpitrain.kernels.kernel import has_numba

for module in pkgutil.iter_modules(mpitrain.kernels.__path__):
    importlib.import_module(f"mpitrain.kernels.{module.name}")

CASES = [(name, dtype) for name in sorted(KERNELS) for dtype in EXAMPLES[name].dtypes]
IN_NUMBA = [(name, dtype) for name, dtype in CASES if KERNELS[name].numba() is not None]

# In these C and Numba do the same operations in the same order, whatever C is compiled for. Sums along rows of norms and products
# run in vectors as wide as the CPU has, so theirs are only close.
SAME_BITS = ("relu", "sigmoid", "gelu", "gelu_tanh", "silu", "gelu_and_slope", "gelu_tanh_and_slope", "silu_and_slope",
             "slope_grad", "relu_grad", "tanh_grad", "sigmoid_grad", "softmax", "softmax_grad", "log_softmax_grad",
             "cross_entropy_grad", "scatter_add_rows", "sgd", "sgd_momentum", "adam", "lamb", "rmsprop", "square_sums",
             "random_words", "column_sums", "resample", "subsample", "subsample_gradient", "erf", "erfc", "erfcx", "erfinv",
             "remainder", "fmod", "logaddexp", "replace", "cumsum", "cumprod", "cumprod_gradient", "prod_gradient", "prod",
             "cumextremum", "extreme", "place_of_rank", "gather", "scatter", "triangle", "block_product", "csr_product",
             "lowbit_rows", "lowbit_int8_integers", "lowbit_int4_integers")


def arrays_of(value: Any) -> list[np.ndarray]:
    """All arrays in a result or in arguments, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    return [a for part in value for a in arrays_of(part)] if isinstance(value, tuple | list) else []


def largest_difference(found: Any, wanted: Any) -> float:
    """Relative to the largest wanted value, over all arrays; shapes and dtypes must be equal."""
    worst = 0.0
    for a, b in zip(arrays_of(found), arrays_of(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if b.size:
            wide = np.complex128 if b.dtype.kind == "c" else np.float64
            scale = float(np.abs(b.astype(wide)).max()) or 1.0
            worst = max(worst, float(np.abs(a.astype(wide) - b.astype(wide)).max()) / scale)
    return worst


def arguments_of(kernel: Kernel, dtype: str) -> tuple[Any, ...]:
    return EXAMPLES[kernel.name].arguments(np.random.default_rng(1), np.dtype(dtype))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_compiled_kernel_equals_its_reference(name: str, dtype: str) -> None:
    kernel = KERNELS[name]
    compiled = kernel.host()
    if compiled is None:
        pytest.skip(f"no compiled version: {native.missing() or 'the kernel has none for the host'}")
    arguments = arguments_of(kernel, dtype)
    given, expected = copy.deepcopy(arguments), copy.deepcopy(arguments)
    found, wanted = compiled(*given), kernel.reference(*expected)
    tolerance = EXAMPLES[name].tolerance * (1e-6 if dtype == "float64" else 1)
    assert largest_difference(found, wanted) <= tolerance
    assert largest_difference(given, expected) <= tolerance, "what it writes in place differs"


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_compiled_kernel_gives_the_same_bits_again(name: str, dtype: str) -> None:
    kernel = KERNELS[name]
    first, second = (kernel(*arguments_of(kernel, dtype)) for _ in range(2))
    for a, b in zip(arrays_of(first), arrays_of(second), strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_test_of_kernels_notices_a_wrong_one() -> None:
    assert largest_difference(np.ones(3), np.array([1, 1, 1.001])) > 1e-4


def test_a_kernel_falls_back_to_its_reference_where_nothing_can_be_compiled() -> None:
    kernel = Kernel("only_in_this_test", lambda x: x + 1, host=lambda: None)
    del KERNELS["only_in_this_test"]
    assert kernel(np.zeros(2)).tolist() == [1, 1]


def test_no_two_kernels_share_a_name() -> None:
    with pytest.raises(AssertionError, match="defined twice"):
        Kernel("softmax", lambda x: x)


@pytest.mark.parametrize(("name", "dtype"), IN_NUMBA)
def test_a_loop_of_numba_equals_the_reference_and_the_bits_of_c_where_they_are_promised(name: str, dtype: str) -> None:
    kernel, version = KERNELS[name], KERNELS[name].numba()
    assert version is not None
    given, expected, in_c = (copy.deepcopy(arguments_of(kernel, dtype)) for _ in range(3))
    found, wanted = version(*given), kernel.reference(*expected)
    tolerance = EXAMPLES[name].tolerance * (1e-6 if dtype == "float64" else 1)
    assert largest_difference(found, wanted) <= tolerance
    assert largest_difference(given, expected) <= tolerance, "what it writes in place differs"
    if name in SAME_BITS and native.load("rows") is not None:
        for a, b in zip(arrays_of((found, given)), arrays_of((kernel.host()(*in_c), in_c)), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
def test_a_loop_of_numba_is_found_in_the_cache_by_the_next_process() -> None:
    """Its key has the functions that a maker put into the loop, which are the same elsewhere where a module has them by name."""
    import mpitrain.kernels.loops
    inner = []
    for module in pkgutil.iter_modules(mpitrain.kernels.loops.__path__):
        for made in vars(importlib.import_module(f"mpitrain.kernels.loops.{module.name}")).values():
            inner += [cell.cell_contents for cell in getattr(made, "__closure__", None) or ()]
    inner = [function for function in inner if isinstance(function, FunctionType)]
    assert len(inner) > 20
    for function in inner:
        assert getattr(sys.modules[function.__module__], function.__qualname__, None) is function, function
