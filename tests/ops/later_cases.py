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
SHAPES = """adjoint atleast_1d atleast_2d atleast_3d clone contiguous diag diag_embed diagflat diagonal fliplr flipud flatten
    ravel rot90 t trace tril triu unbind"""
STACKS = "column_stack dstack hstack vstack"
REDUCTIONS = """
    all aminmax any argmax argmin argsort argwhere count_nonzero erf erfc erfcx log_ndtr median msort nan_to_num nanmean
    nanmedian nansum ndtr nonzero norm normalize prod sinc sort std std_mean var_mean"""
PARTS = "chunk dsplit hsplit tensor_split vsplit"
NEW: dict[str, tuple[Any, ...]] = {
    "arange": (3,), "broadcast_shapes": ((3, 1), (2,)), "eye": (2,), "full": ((2,), 3.0), "linspace": (0, 1, 3),
    "logspace": (0, 1, 3), "ones": (2,), "tensor": ([1.0, 2.0],), "tril_indices": (2, 2), "triu_indices": (2, 2), "zeros": (2,)}


def put_like(x: Any, made: Any) -> Tensor:
    """What an op without inputs made, which is always on the host, beside x."""
    return Tensor(x.xp.asarray(np.asarray(made).tolist()))


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
    **{name: [(lambda x, name=name: getattr(ops, name)(x), normal(3, 3))] for name in SHAPES.split()},
    "roll": [(lambda x: ops.roll(x, 1, 0), normal(3, 2)), (lambda x: ops.roll(x, 2), normal(3, 2))],
    "flip": [(lambda x: ops.flip(x, 0), normal(3, 2))],
    "repeat": [(lambda x: ops.repeat(x, 2, 3), normal(3))],
    "tile": [(lambda x: ops.tile(x, 2), normal(2, 3))],
    "repeat_interleave": [(lambda x: ops.repeat_interleave(x, 2, 0), normal(2, 3)), (ops.repeat_interleave, normal(3), ROWS)],
    "permute": [(lambda x: ops.permute(x, 1, 0), normal(2, 3))],
    "movedim": [(lambda x: ops.movedim(x, 0, 1), normal(2, 3))],
    "unflatten": [(lambda x: ops.unflatten(x, 0, (2, -1)), normal(4, 3))],
    "expand": [(lambda x: ops.expand(x, 2, -1), normal(3))],
    "expand_as": [(ops.expand_as, normal(3), normal(2, 3))],
    "reshape_as": [(ops.reshape_as, normal(6), normal(2, 3))],
    "sum_to_size": [(lambda x: ops.sum_to_size(x, 3), normal(2, 3))],
    "select": [(lambda x: ops.select(x, 1, 0), normal(2, 3))],
    "narrow": [(lambda x: ops.narrow(x, 1, 1, 2), normal(2, 3))],
    "unfold": [(lambda x: ops.unfold(x, 1, 2, 1), normal(2, 3))],
    "diagonal_scatter": [(ops.diagonal_scatter, normal(3, 3), normal(3))],
    "select_scatter": [(lambda x, y: ops.select_scatter(x, y, 0, 1), normal(3, 2), normal(2))],
    "slice_scatter": [(lambda x, y: ops.slice_scatter(x, y, 0, 1), normal(3, 2), normal(2, 2))],
    **{name: [(lambda *xs, name=name: getattr(ops, name)(xs), normal(2, 3), normal(2, 3, seed=1))] for name in STACKS.split()},
    **{name: [(lambda x, name=name: getattr(ops, name)(x, 2), normal(2, 2, 2))] for name in PARTS.split()},
    "meshgrid": [(ops.meshgrid, normal(2), normal(3))],
    "cartesian_prod": [(ops.cartesian_prod, normal(2), normal(3))],
    "combinations": [(ops.combinations, normal(4))],
    "broadcast_tensors": [(ops.broadcast_tensors, normal(3), normal(2, 1))],
    "block_diag": [(ops.block_diag, normal(2, 3), normal(1, 2))],
    **{name: [(getattr(ops, name), normal(2, 3))] for name in ("zeros_like", "ones_like")},
    **{name: [(getattr(ops, name), normal(3, 4))] for name in REDUCTIONS.split()},
    **{name: [(lambda x, name=name: getattr(ops, name)(x, 1), normal(3, 4))]
       for name in ("max_with_index", "min_with_index", "topk")},
    "kthvalue": [(lambda x: ops.kthvalue(x, 2), normal(3, 4))],
    **{name: [(lambda x, name=name: getattr(ops, name)(x, [0.2, 0.5], 1), normal(3, 4))] for name in ("quantile", "nanquantile")},
    **{name: [(getattr(ops, name), np.array([3, 1, 1, 2]))] for name in ("bincount", "unique", "unique_consecutive")},
    "searchsorted": [(ops.searchsorted, np.array([1.0, 2.0]), normal(3))],
    "bucketize": [(ops.bucketize, normal(3), np.array([1.0, 2.0]))],
    "erfinv": [(ops.erfinv, positive(3) / 2.1)],
    "logit": [(ops.logit, positive(3) / 2.1)], "entr": [(ops.entr, positive(3))],
    "lgamma": [(ops.lgamma, normal(9)), (ops.lgamma, 8 * positive(9))],
    "digamma": [(ops.digamma, normal(9)), (ops.digamma, 8 * positive(9))],
    "polygamma": [(lambda x: ops.polygamma(2, x), positive(9))],
    "mvlgamma": [(lambda x: ops.mvlgamma(x, 3), positive(9) + 1)],
    "full_like": [(lambda x: ops.full_like(x, 2), normal(3))],
    "new_zeros": [(lambda x: ops.new_zeros(x, 2), normal(3))],
    "new_ones": [(lambda x: ops.new_ones(x, 2), normal(3))],
    "new_full": [(lambda x: ops.new_full(x, (2,), 3), normal(3))],
    "astype": [(lambda x: ops.astype(x, "int64"), normal(3))],
    **{name: [(lambda x, name=name, args=args: put_like(x, getattr(ops, name)(*args)), normal(3))] for name, args in NEW.items()},
    **{name: [(getattr(ops, name), normal(3, 4))] for name in ACTIVATIONS.split()},
    "prelu": [(ops.prelu, normal(3, 4), normal(4, seed=1)), (ops.prelu, normal(3, 4), normal(1))],
    "rotary_embedding": [(ops.rotary_embedding, normal(2, 3, 4)),
                         (lambda x: ops.rotary_embedding(x, width=2, interleaved=True), normal(2, 3, 4))],
    "rrelu": [(lambda x: ops.rrelu(x, "a layer"), normal(3, 4))],
    "threshold": [(lambda x: ops.threshold(x, 0.1, 2.0), normal(3, 4))],
}
