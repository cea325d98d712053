"""Cases of test_on_a_device.py for the operations of the files that are read when one is asked for."""

from __future__ import annotations

from typing import Any

from ops.parity import normal, positive

from mpitrain import ops

ANY = """
    asinh atan ceil cos cosh deg2rad exp2 expm1 floor frac positive rad2deg reciprocal round sgn sign sin sinh square tan trunc"""
POSITIVE = "log10 log1p log2 rsqrt"
BELOW_ONE = "acos asin atanh"
ACTIVATIONS = """
    celu elu glu hardshrink hardsigmoid hardswish hardtanh log_sigmoid mish relu6 selu softmin softshrink softsign swiglu
    tanhshrink"""

CASES: dict[str, list[tuple[Any, ...]]] = {
    **{name: [(getattr(ops, name), normal(3, 4))] for name in ANY.split()},
    **{name: [(getattr(ops, name), positive(3, 4))] for name in POSITIVE.split()},
    **{name: [(getattr(ops, name), positive(3, 4) / 2.1)] for name in BELOW_ONE.split()},
    "acosh": [(ops.acosh, positive(3) + 1)],
    **{name: [(getattr(ops, name), normal(3, 4))] for name in ACTIVATIONS.split()},
    "prelu": [(ops.prelu, normal(3, 4), normal(4, seed=1)), (ops.prelu, normal(3, 4), normal(1))],
    "rrelu": [(lambda x: ops.rrelu(x, "a layer"), normal(3, 4))],
    "threshold": [(lambda x: ops.threshold(x, 0.1, 2.0), normal(3, 4))],
}
