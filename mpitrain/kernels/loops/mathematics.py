"""Functions of one number for loops of Numba, with the operations of native/vector_math.h in its order: the same bits.

`fma`, `bits_of` and `number_of` become instructions of the CPU, so loops that call these become vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.extending import register_jitable

intrinsic: Any = extending.intrinsic              # to mypy its functions had the arguments of their makers
overload: Any = extending.overload
f, d = np.float32, np.float64
u = np.uint64                                     # x[u(i)] in a loop: an index that may be negative is looked at, which is slow


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return a(a, a, a), lambda context, builder, signature, arguments: builder.fma(*arguments)


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """The bits of a number as an integer as wide."""
    wide: Any = types.uint32 if x == types.float32 else types.uint64
    return wide(x), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], ir.IntType(wide.bitwidth))


@intrinsic
def number_of(context: Any, bits: Any) -> Any:
    """The number that has these bits."""
    number, kind = (types.float32, ir.FloatType()) if bits == types.uint32 else (types.float64, ir.DoubleType())
    return number(bits), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], kind)


@intrinsic
def choose(context: Any, condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b, without a branch."""
    return a(condition, a, a), lambda context, builder, signature, arguments: builder.select(*arguments)


@intrinsic
def trunc(context: Any, x: Any) -> Any:
    """The whole number next to x on the way to 0."""
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.trunc", [arguments[0].type]), arguments)
    return x(x), emit


@intrinsic
def fmod(context: Any, a: Any, b: Any) -> Any:
    """C's remainder of a / b, exact."""
    return a(a, a), lambda context, builder, signature, arguments: builder.frem(*arguments)


def polynomial(*coefficients: float) -> Any:
    """A function of one float64, by Horner's rule; the coefficient of the highest power stands first."""
    @intrinsic
    def value(context: Any, t: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, *rest = (ir.Constant(ir.DoubleType(), coefficient) for coefficient in coefficients)
            for coefficient in rest:
                first = builder.fma(first, arguments[0], coefficient)
            return first
        return t(t), emit
    return value


def exp(x: Any) -> Any: ...
def exp_of_negative(x: Any) -> Any: ...
def density(x: Any) -> Any: ...
def tanh(x: Any) -> Any: ...
def normal_tail(x: Any, density: Any) -> Any: ...
def constant(x: Any, value: Any) -> Any: ...


@overload(exp)
def _exp(x: Any) -> Any:
    def single(x: Any) -> Any:
        shifted = fma(x, f(1.442695041), f(12582912.0))
        n = shifted - f(12582912.0)
        r = fma(n, f(2.12194440e-4), fma(n, f(-0.693359375), x))
        s = f(0.001392692661)
        s = fma(s, r, f(0.008363773874))
        s = fma(s, r, f(0.04166655011))
        s = fma(s, r, f(0.1666657338))
        s = fma(s, r, f(0.5))
        s = fma(s * r, r, r) + f(1.0)
        power = number_of(np.uint32((bits_of(shifted) + np.uint32(126)) << np.uint32(23)))
        result = s * power * f(2.0)
        result = choose(x > f(88.72283), f(np.inf), result)
        return choose(x < f(-86.6), f(0.0), result)

    def double(x: Any) -> Any:
        result = _exp_times(x, np.uint64(1022)) * 2.0
        result = choose(x > 709.782712893384, np.inf, result)
        return choose(x < -707.5, 0.0, result)
    return single if x == types.float32 else double


@register_jitable
def _less_one(r: Any) -> Any:
    """exp(r) - 1 in float64, next to 0."""
    s = 2.51013469283503402e-8
    s = fma(s, r, 2.76213386691429238e-7)
    s = fma(s, r, 2.75572664186123037e-6)
    s = fma(s, r, 0.0000248015186413959936)
    s = fma(s, r, 0.000198412698643805133)
    s = fma(s, r, 0.00138888889189391678)
    s = fma(s, r, 0.0083333333333297935)
    s = fma(s, r, 0.0416666666666206386)
    s = fma(s, r, 0.166666666666666675)
    s = fma(s, r, 0.500000000000000113)
    return fma(s * r, r, r)


@register_jitable
def _exp_times(x: Any, bias: Any) -> Any:
    """exp(x) in float64, without its ends; `bias` goes to the exponent."""
    shifted = fma(x, 1.44269504088896341, 6755399441055744.0)
    n = shifted - 6755399441055744.0
    r = fma(n, -1.90821492927058770e-10, fma(n, -0.693147180369123816, x))
    s = _less_one(r) + 1.0
    return s * number_of((bits_of(shifted) + bias) << np.uint64(52))


@register_jitable
def _power_below(x: Any, scale: Any, least: Any, factor: Any) -> Any:
    """power_below_float32 of vector_math.h."""
    shifted = fma(x, scale, f(12583039.0))
    r = fma(x, scale, f(12583039.0) - shifted)
    s = f(0.001326472707) * factor
    s = fma(s, r, f(0.009671512649) * factor)
    s = fma(s, r, f(0.05550733744) * factor)
    s = fma(s, r, f(0.2402224209) * factor)
    s = fma(s, r, f(0.6931469776) * factor)
    s = fma(s, r, factor)
    power = number_of(np.uint32(bits_of(shifted) << np.uint32(23)))
    return choose(x > least if scale < 0 else x < least, f(0.0), s * power)


@overload(exp_of_negative)
def _exp_of_negative(x: Any) -> Any:
    def single(x: Any) -> Any:
        return _power_below(x, f(1.442695041), f(-86.6), f(1.0))

    def double(x: Any) -> Any:
        return choose(x < -707.5, 0.0, _exp_times(x, np.uint64(1023)))
    return single if x == types.float32 else double


@overload(density)
def _density(x: Any) -> Any:
    def single(x: Any) -> Any:
        return _power_below(x * x, f(-0.7213475204), f(173.2), f(0.3989422804))

    def double(x: Any) -> Any:
        return 0.398942280401432678 * exp_of_negative(-0.5 * x * x)
    return single if x == types.float32 else double


@overload(tanh)
def _tanh(x: Any) -> Any:
    def single(x: Any) -> Any:
        y = f(-2.0) * abs(x)
        y = choose(y < f(-20.0), f(-20.0), y)
        shifted = fma(y, f(1.442695041), f(12583039.0))
        n = shifted - f(12583039.0)
        r = fma(n, f(2.12194440e-4), fma(n, f(-0.693359375), y))
        s = f(0.001392692661)
        s = fma(s, r, f(0.008363773874))
        s = fma(s, r, f(0.04166655011))
        s = fma(s, r, f(0.1666657338))
        s = fma(s, r, f(0.5))
        power = number_of(np.uint32(bits_of(shifted) << np.uint32(23)))
        q = fma(s * r, r, r)
        t = fma(power, q, power)
        over = choose(y > f(-1.0), -fma(power, q, power - f(1.0)), f(-2.0) * t)
        size = bits_of(choose(y > f(-1.0), f(0.0), f(1.0)) + over / (t + f(1.0))) & np.uint32(0x7FFFFFFF)
        return number_of(np.uint32(size | (bits_of(x) & np.uint32(0x80000000))))

    def double(x: Any) -> Any:
        y = -2.0 * abs(x)
        y = choose(y < -40.0, -40.0, y)
        shifted = fma(y, 1.44269504088896341, 6755399441056767.0)
        n = shifted - 6755399441056767.0
        r = fma(n, -1.90821492927058770e-10, fma(n, -0.693147180369123816, y))
        power = number_of(bits_of(shifted) << np.uint64(52))
        q = _less_one(r)
        t = fma(power, q, power)
        over = choose(y > -1.0, -fma(power, q, power - 1.0), -2.0 * t)
        size = bits_of(choose(y > -1.0, 0.0, 1.0) + over / (t + 1.0)) & np.uint64(0x7FFFFFFFFFFFFFFF)
        return number_of(size | (bits_of(x) & np.uint64(0x8000000000000000)))
    return single if x == types.float32 else double


@overload(normal_tail)
def _normal_tail(x: Any, density: Any) -> Any:
    def single(x: Any, density: Any) -> Any:
        t = f(1.0) / fma(abs(x), f(0.28), f(1.0))
        s = f(-0.284848257)
        s = fma(s, t, f(1.0667909))
        s = fma(s, t, f(-0.761969692))
        s = fma(s, t, f(0.839644098))
        s = fma(s, t, f(0.0787725354))
        s = fma(s, t, f(0.3179502))
        s = fma(s, t, f(-0.00302559148))
        return density * s

    def double(x: Any, density: Any) -> Any:
        t = 1.0 / fma(abs(x), 0.212132034355964257, 1.0)
        s = -0.0002957930221495414
        s = fma(s, t, 0.0023137466277165027)
        s = fma(s, t, -0.005370149958853268)
        s = fma(s, t, -0.008913636514794054)
        s = fma(s, t, 0.08620482412893973)
        s = fma(s, t, -0.25425616905907544)
        s = fma(s, t, 0.4502078196640468)
        s = fma(s, t, -0.5521293595538523)
        s = fma(s, t, 0.507300286977084)
        s = fma(s, t, -0.36309370677984654)
        s = fma(s, t, 0.19992166350835408)
        s = fma(s, t, -0.09228670006205274)
        s = fma(s, t, 0.035578512582493456)
        s = fma(s, t, 0.0013673815162331033)
        s = fma(s, t, 0.02400475239137147)
        s = fma(s, t, 0.034706666612936754)
        s = fma(s, t, 0.049171880722882505)
        s = fma(s, t, 0.0622869045666422)
        s = fma(s, t, 0.07320406721917487)
        s = fma(s, t, 0.08082013254427863)
        s = fma(s, t, 0.08462843836906608)
        s = fma(s, t, 0.08462843751940366)
        return density * (2.50662827463100050 * t * s)
    return single if x == types.float32 else double


@overload(constant)
def _constant(x: Any, value: Any) -> Any:
    """`value` as a number of the type of x."""
    def single(x: Any, value: Any) -> Any:
        return f(value)

    def double(x: Any, value: Any) -> Any:
        return d(value)
    return single if x == types.float32 else double


@register_jitable
def sigmoid(x: Any) -> Any:
    one = constant(x, 1.0)
    return one / (one + exp(-x))
