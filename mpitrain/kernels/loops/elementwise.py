"""Functions of one and two numbers as in native/elementwise.c, with its operations in its order: the same bits."""

from __future__ import annotations

import math
from typing import Any

from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import choose, constant, d, exp_of_negative, fma, fmod, polynomial, trunc, u

PART = 512

# log((1 + s) / (1 - s)) / s of t = s^2, |s| <= 1/3
twice_atanh_to_a_third = polynomial(
    0.16488285931389568, 0.06980390498332432, 0.10976616637947494, 0.11715274668110426, 0.13336876815743837, 0.1538444706045997,
    0.18181823422495252, 0.22222222119103674, 0.28571428572622926, 0.3999999999999287, 0.6666666666666669, 2.0)


@register_jitable
def _logaddexp(a: Any, b: Any) -> Any:
    """The larger one + log(1 + v), v = exp(-|a - b|) = s 2 / (1 - s)."""
    most, gap = choose(a > b, a, b), choose(a > b, b - a, a - b)
    v = exp_of_negative(gap)
    s = v / (2.0 + v)
    sum = fma(s, twice_atanh_to_a_third(s * s), most)
    return choose(a == b, a + 0.693147180559945309, sum)     # infinities have no difference; NaN gives NaN


def logaddexp(x: Any, y: Any, z: Any, n: int) -> None:
    for i in range(n):
        z[u(i)] = _logaddexp(d(x[u(i)]), d(y[u(i)]))


@register_jitable
def _rest(a: Any, b: Any) -> Any:
    """|a| - |b| trunc(|a / b|)."""
    return fma(-trunc(abs(a) / abs(b)), abs(b), abs(a))


@register_jitable
def _is_sure(a: Any, b: Any, rest: Any) -> Any:
    return (abs(a) < abs(b) * 1e15) & (abs(b) > 1e-290) & (rest >= 0.0) & (rest < abs(b))


@register_jitable
def _signed(m: Any, b: Any) -> Any:
    """With the sign of b, as Python's."""
    other = choose((m < 0) != (b < 0), m + b, m)
    return choose(m == 0, constant(m, math.copysign(0.0, d(b))), other)


def remainder(x: Any, y: Any, z: Any, python: int, n: int) -> None:
    for first in range(0, n, PART):
        last, unsure = min(n, first + PART), 0
        for i in range(first, last):
            a, b = d(x[u(i)]), d(y[u(i)])
            rest = _rest(a, b)
            m = constant(x[u(i)], math.copysign(rest, a))
            z[u(i)] = choose(python != 0, _signed(m, y[u(i)]), m)
            unsure += choose(_is_sure(a, b, rest), 0, 1)
        if unsure:
            for i in range(first, last):
                a, b = d(x[u(i)]), d(y[u(i)])
                if not _is_sure(a, b, _rest(a, b)):
                    m = constant(x[u(i)], fmod(a, b))
                    z[u(i)] = choose(python != 0, _signed(m, y[u(i)]), m)


def replace(x: Any, y: Any, missing: float, most: float, least: float, n: int) -> None:
    a, b, c = x.dtype.type(missing), x.dtype.type(most), x.dtype.type(least)
    for i in range(n):
        v = x[u(i)]
        y[u(i)] = choose(v != v, a, choose(v == math.inf, b, choose(v == -math.inf, c, v)))
