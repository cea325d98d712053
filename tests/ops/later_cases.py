"""Cases of test_on_a_device.py for the operations of the files that are read when one is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from ops.parity import normal, positive

from mpitrain import Tensor, ops

ANY = """
    asinh atan ceil cos cosh deg2rad exp2 expm1 floor frac isfinite isinf isnan isneginf isposinf isreal logical_not
    positive rad2deg reciprocal round sgn sign signbit sin sinh square tan trunc"""
POSITIVE = "log10 log1p log2 rsqrt"
BELOW_ONE = "acos asin atanh"
PAIRS = """atan2 copysign floor_divide fmax fmin fmod heaviside hypot isclose ldexp logaddexp logaddexp2 logical_and logical_or
    logical_xor remainder trunc_divide"""
BITS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm"
SCANS = "cummax cummin cumprod cumsum logcumsumexp"
INDEX = np.array([[2, 0], [2, 1]])
ROWS = np.array([2, 0, 2])
MASK = np.array([[True, False], [False, False], [True, True]])
ACTIVATIONS = """
    celu elu glu hardshrink hardsigmoid hardswish hardtanh log_sigmoid mish relu6 selu softmin softshrink softsign swiglu
    tanhshrink"""

CASES: dict[str, list[tuple[Any, ...]]] = {
    **{name: [(getattr(ops, name), normal(3, 4))] for name in ANY.split()},
    **{name: [(getattr(ops, name), positive(3, 4))] for name in POSITIVE.split()},
    **{name: [(getattr(ops, name), positive(3, 4) / 2.1)] for name in BELOW_ONE.split()},
    "acosh": [(ops.acosh, positive(3) + 1)],
    **{name: [(getattr(ops, name), normal(3, 4), positive(4))] for name in PAIRS.split()},
    **{name: [(getattr(ops, name), np.array([6, 4]), np.array([4, 3]))] for name in BITS.split()},
    "bitwise_not": [(ops.bitwise_not, np.array([6, 4]))],
    "addcmul": [(ops.addcmul, normal(3), normal(3, seed=1), normal(3, seed=2))],
    "addcdiv": [(ops.addcdiv, normal(3), normal(3, seed=1), positive(3))],
    "lerp": [(lambda x, y: ops.lerp(x, y, 0.3), normal(3), normal(3, seed=1))],
    "clamp": [(ops.clamp, normal(5), normal(5, seed=1), normal(5, seed=2))],
    "xlogy": [(ops.xlogy, normal(3), positive(3))],
    "xlog1py": [(ops.xlog1py, normal(3), positive(3))],
    "isin": [(ops.isin, np.array([1, 2, 3]), np.array([2, 5]))],
    "allclose": [(lambda x: Tensor(x.xp.asarray(float(ops.allclose(x, x)))), normal(3))],
    **{name: [(lambda x, name=name: getattr(ops, name)(x, 1), normal(3, 4))] for name in SCANS.split()},
    "diff": [(ops.diff, normal(3, 4))],
    "trapezoid": [(ops.trapezoid, normal(3, 4), normal(4))],
    "cumulative_trapezoid": [(ops.cumulative_trapezoid, normal(3, 4), normal(4))],
    "gather": [(lambda x, i: ops.gather(x, 0, i), normal(3, 2), INDEX)],
    "take_along_dim": [(lambda x, i: ops.take_along_dim(x, i, 0), normal(3, 2), INDEX)],
    "scatter": [(lambda x, i, y: ops.scatter(x, 0, i, y), normal(3, 2), INDEX, normal(2, 2))],
    "scatter_add": [(lambda x, i, y: ops.scatter_add(x, 0, i, y), normal(3, 2), INDEX, normal(2, 2))],
    "scatter_reduce": [(lambda x, i, y, kind=kind: ops.scatter_reduce(x, 0, i, y, kind), normal(3, 2), INDEX, normal(2, 2))
                       for kind in ("sum", "prod", "mean", "amin", "amax")],
    "index_reduce": [(lambda x, i, y: ops.index_reduce(x, 0, i, y, "prod"), normal(3, 2), ROWS, normal(3, 2))],
    "index_add": [(lambda x, i, y: ops.index_add(x, 0, i, y), normal(3, 2), ROWS, normal(3, 2))],
    "index_copy": [(lambda x, i, y: ops.index_copy(x, 0, i, y), normal(3, 2), ROWS[:2], normal(2, 2))],
    "index_fill": [(lambda x, i: ops.index_fill(x, 0, i, 2.0), normal(3, 2), ROWS)],
    "index_put": [(lambda x, i, y: ops.index_put(x, (i,), y, True), normal(3, 2), ROWS, normal(3, 2))],
    "index_select": [(lambda x, i: ops.index_select(x, 1, i), normal(3, 4), ROWS)],
    "masked_fill": [(lambda x, m: ops.masked_fill(x, m, 2.0), normal(3, 2), MASK)],
    "masked_select": [(ops.masked_select, normal(3, 2), MASK)],
    "masked_scatter": [(ops.masked_scatter, normal(3, 2), MASK, normal(6))],
    "one_hot": [(ops.one_hot, INDEX)],
    **{name: [(getattr(ops, name), normal(3, 4))] for name in ACTIVATIONS.split()},
    "prelu": [(ops.prelu, normal(3, 4), normal(4, seed=1)), (ops.prelu, normal(3, 4), normal(1))],
    "rrelu": [(lambda x: ops.rrelu(x, "a layer"), normal(3, 4))],
    "threshold": [(lambda x: ops.threshold(x, 0.1, 2.0), normal(3, 4))],
}
