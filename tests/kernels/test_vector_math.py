"""exp and the normal distribution in vector_math.h: the errors that it states, against the C library's long double."""

from __future__ import annotations

import ctypes

import pytest
from c_library import compiled

SOURCE = r"""
#include <math.h>
#include "vector_math.h"

#define WORST(T, NAME)                                                                              \
double worst_exp_##NAME(double low, double high, long points)                                       \
{                                                                                                   \
    double worst = 0;                                                                               \
    for (long i = 0; i <= points; i++) {                                                            \
        T x = (T)(low + (high - low) * i / points);                                                 \
        long double wanted = expl((long double)x);                                                  \
        double error = (double)(fabsl(exp_##NAME(x) - wanted) / wanted);                            \
        if (!(error <= worst)) worst = error;                                                       \
    }                                                                                               \
    return worst;                                                                                   \
}                                                                                                   \
double worst_below_##NAME(double low, double high, long points)   /* less what -x adds to it */     \
{                                                                                                   \
    double worst = 0;                                                                               \
    for (long i = 0; i <= points; i++) {                                                            \
        T x = (T)(low + (high - low) * i / points);                                                 \
        long double wanted = expl((long double)x);                                                  \
        double error = (double)(fabsl(exp_of_negative_##NAME(x) - wanted) / wanted);                \
        if (sizeof(T) == 4) error -= 3e-8 * -x;                                                     \
        if (!(error <= worst)) worst = error;                                                       \
    }                                                                                               \
    return worst;                                                                                   \
}                                                                                                   \
double worst_tail_##NAME(double low, double high, long points)                                      \
{                                                                                                   \
    double worst = 0;                                                                               \
    for (long i = 0; i <= points; i++) {                                                            \
        T x = (T)(low + (high - low) * i / points);                                                 \
        long double wanted = erfcl(fabsl((long double)x) * sqrtl(0.5L)) / 2;                        \
        T found = normal_tail_##NAME(x, density_##NAME(x));                                         \
        double error = (double)(fabsl(found - wanted) / wanted);                                    \
        if (!(error <= worst)) worst = error;                                                       \
    }                                                                                               \
    return worst;                                                                                   \
}                                                                                                   \
double worst_tanh_##NAME(double low, double high, long points)                                      \
{                                                                                                   \
    double worst = 0;                                                                               \
    for (long i = 0; i <= points; i++) {                                                            \
        T x = (T)(low + (high - low) * i / points);                                                 \
        long double wanted = tanhl((long double)x);                                                 \
        double error = wanted ? (double)fabsl((tanh_##NAME(x) - wanted) / wanted) : tanh_##NAME(x); \
        if (!(error <= worst)) worst = error;                                                       \
    }                                                                                               \
    return worst;                                                                                   \
}                                                                                                   \
double tanh_at_##NAME(double x) { return tanh_##NAME((T)x); }                                       \
double exp_at_##NAME(double x) { return exp_##NAME((T)x); }                                         \
double exp_of_negative_at_##NAME(double x) { return exp_of_negative_##NAME((T)x); }

WORST(float, float32)
WORST(double, float64)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("vector_math"), SOURCE)


def worst(library: ctypes.CDLL, what: str, low: float, high: float, points: int = 100_000) -> float:
    function = getattr(library, f"worst_{what}")
    function.argtypes, function.restype = [ctypes.c_double, ctypes.c_double, ctypes.c_long], ctypes.c_double
    return float(function(low, high, points))


@pytest.mark.parametrize(("name", "low", "high", "stated"), [
    ("exp_float32", -86.5, 88.7, 9e-8), ("exp_float32", -1.0, 1.0, 9e-8),
    ("exp_float64", -707.0, 709.7, 1.7e-16), ("exp_float64", -1.0, 1.0, 1.7e-16),
    ("below_float32", -86.5, 0.0, 1.9e-7), ("below_float32", -1.0, 0.0, 1.9e-7), ("below_float64", -707.0, 0.0, 1.7e-16),
    ("tanh_float32", -0.5, 0.5, 1.7e-7), ("tanh_float32", -20.0, 20.0, 1.7e-7), ("tanh_float32", 0.7, 9.0, 1.2e-7),
    ("tanh_float64", -0.5, 0.5, 3.6e-16), ("tanh_float64", -40.0, 40.0, 3.6e-16), ("tanh_float64", 0.7, 19.0, 2.1e-16),
    ("tail_float32", -3.0, 3.0, 7.1e-7), ("tail_float64", -3.0, 3.0, 1e-15)])
def test_the_largest_relative_error_is_the_one_stated(library: ctypes.CDLL, name: str, low: float, high: float,
                                                      stated: float) -> None:
    assert 0.3 * stated < worst(library, name, low, high) <= stated


@pytest.mark.parametrize(("name", "largest", "smallest"), [("float32", 88.72283, -86.6), ("float64", 709.782712893384, -707.5)])
def test_exp_is_infinite_above_and_zero_below_its_range(library: ctypes.CDLL, name: str, largest: float,
                                                        smallest: float) -> None:
    for what in ("exp_at", "exp_of_negative_at"):
        function = getattr(library, f"{what}_{name}")
        function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
        assert function(smallest * 1.001) == 0.0 and function(float("-inf")) == 0.0 and function(smallest * 0.999) > 0.0
        assert function(0.0) == function(-0.0) == 1.0 and function(float("nan")) != function(float("nan"))
        if what == "exp_at":
            assert function(largest * 1.001) == float("inf") and function(float("inf")) == float("inf")
            assert function(largest * 0.9999) < float("inf")


def test_a_tail_so_far_out_that_it_hardly_counts_is_off_by_little(library: ctypes.CDLL) -> None:
    assert worst(library, "tail_float32", 3.0, 5.5) < 3e-6 and worst(library, "tail_float32", 5.5, 12.9) < 0.05


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_tanh_keeps_signs_of_zero_small_numbers_and_nan(library: ctypes.CDLL, name: str) -> None:
    function = getattr(library, f"tanh_at_{name}")
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    assert str(function(-0.0)) == "-0.0" and str(function(0.0)) == "0.0" and function(float("nan")) != function(float("nan"))
    assert function(1e-30) == pytest.approx(1e-30) and function(float("inf")) == 1.0 and function(float("-inf")) == -1.0
