"""Elementwise operations, reductions, scans, sorting, indexing and shapes: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import takes

from mpitrain import ops


def alpha(op: Callable[..., Any]) -> Callable[..., Any]:
    """torch's add and sub, whose second operand may be scaled."""
    def call(x: Any, y: Any, *, alpha: float = 1) -> Any:
        return op(x, y if alpha == 1 else y * alpha)
    return call


def dims(op: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction whose dim may be a list, or empty for all."""
    def call(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return op(x, tuple(dim) if isinstance(dim, list) else dim, keepdim, **kwargs)
    return call


def deviation(op: Callable[..., Any]) -> Callable[..., Any]:
    """torch's var and std, whose old forms take `unbiased`."""
    def call(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        correction = correction if correction is not None else 1 if unbiased is None else int(unbiased)
        return op(x, tuple(dim) if isinstance(dim, list) else dim, keepdim=keepdim, correction=correction)
    return call


def norm(x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """torch.norm, where "fro" of no dims is the norm of all."""
    if dtype is not None:
        x = ops.astype(x, dtype)
    return ops.norm(x, 2 if p is None else p, tuple(dim) if isinstance(dim, list) else dim, keepdim)


def division(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    return {None: ops.divide, "floor": ops.floor_divide, "trunc": ops.trunc_divide}[rounding_mode](x, y)


MAP: dict[str, Callable[..., Any]] = {
    "abs": ops.absolute, "add": alpha(ops.add), "sub": alpha(ops.subtract), "mul": ops.multiply,
    "div.no_rounding_mode": division,
    "div.floor_rounding": division, "div.trunc_rounding": division, "true_divide": division,
    "pow": ops.power, "neg": ops.negative, "exp": ops.exp, "log": ops.log, "sqrt": ops.sqrt,
    "eq": ops.equal, "ne": ops.not_equal, "gt": ops.greater, "ge": ops.greater_equal, "lt": ops.less, "le": ops.less_equal,
    "__radd__": lambda x, y: y + x, "__rmul__": lambda x, y: y * x, "__rdiv__": lambda x, y: y / x,
    "__rmatmul__": lambda x, y: y @ x, "matmul": ops.matmul, "mm": ops.matmul, "bmm": ops.matmul, "mv": ops.matmul,
    "sum": dims(ops.sum), "mean": dims(ops.mean), "logsumexp": dims(ops.logsumexp),
    "reshape": ops.reshape, "permute": ops.permute,
    "broadcast_to": ops.broadcast_to,
    "unsqueeze": ops.expand_dims, "cat": lambda xs, dim=0: ops.concatenate(xs, dim),
    "stack": ops.stack, "split": ops.split, "split.list_args": ops.split, "split_with_sizes": ops.split,
    "__getitem__": ops.getitem,
}

# The same name, and the same arguments.
SAME = """
    acos acosh addcdiv addcmul allclose aminmax argmax argmin argsort argwhere asin asinh atan atan2 atanh atleast_1d
    atleast_2d atleast_3d bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    block_diag broadcast_shapes broadcast_tensors bucketize cartesian_prod ceil chunk clamp column_stack combinations copysign
    cos cosh cummax cummin cumprod cumsum cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal diagonal_scatter diff
    digamma dsplit dstack erf erfc erfinv exp2 expand expand_as expm1 flatten flip fliplr flipud floor floor_divide fmax fmin
    fmod frac gather gcd heaviside hsplit hstack hypot index_add index_copy index_fill index_put index_select isclose isfinite
    isin isinf isnan isneginf isposinf isreal kthvalue lcm ldexp lerp lgamma log10 log1p log2 logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit masked_fill masked_scatter masked_select median movedim
    msort nan_to_num nanmedian nanquantile nansum narrow nonzero positive prod quantile rad2deg ravel reciprocal remainder
    repeat repeat_interleave reshape_as roll rot90 round rsqrt scatter scatter_add searchsorted select select_scatter sgn sign
    signbit sin sinc sinh slice_scatter sort square sum_to_size t take_along_dim tan tanh tensor_split tile topk trace
    trapezoid tril tril_indices triu triu_indices trunc unbind unflatten unfold unique unique_consecutive vsplit vstack xlogy"""
MAP |= {name: getattr(ops, name) for name in SAME.split()}
MAP |= {f"round.{variant}": ops.round for variant in ("decimals_0", "decimals_3", "decimals_neg_3")}
MAP |= {"clamp_max": lambda x, y: ops.clamp(x, max=y), "clamp_min": lambda x, y: ops.clamp(x, min=y)}
MAP |= {f"scatter_reduce.{kind}": ops.scatter_reduce for kind in ("sum", "prod", "mean", "amin", "amax")}
MAP |= {f"index_reduce.{kind}": ops.index_reduce for kind in ("prod", "mean", "amin", "amax")}
MAP |= {"special.xlog1py": ops.xlog1py, "nn.functional.one_hot": ops.one_hot,
        "nn.functional.normalize": ops.normalize, "trapz": ops.trapezoid}

MAP |= {copy: MAP[name] for copy, name in (
    ("permute_copy", "permute"), ("expand_copy", "expand"), ("narrow_copy", "narrow"), ("diagonal_copy", "diagonal"),
    ("unfold_copy", "unfold"), ("unbind_copy", "unbind"), ("unsqueeze_copy", "unsqueeze"), ("unsafe_chunk", "chunk"),
    ("unsafe_split", "split"), ("split_with_sizes_copy", "split_with_sizes"), ("t_copy", "t"), ("view", "reshape"),
    ("view_as", "reshape_as"), ("view_copy", "reshape"))}
MAP |= {
    "meshgrid.variadic_tensors": ops.meshgrid, "meshgrid.list_of_tensors": ops.meshgrid, "linalg.diagonal": (
        lambda x, offset=0, dim1=-2, dim2=-1: ops.diagonal(x, offset, dim1, dim2)), "T": ops.transpose, "mT": ops.adjoint,
    "H": ops.t, "mH": ops.adjoint, "transpose": ops.swapaxes, "transpose_copy": ops.swapaxes, "squeeze": ops.squeeze,
    "squeeze_copy": ops.squeeze, "squeeze.multiple": ops.squeeze,
}
MAP |= {name: takes(getattr(ops, name)) for name in (
    "arange", "clone", "contiguous", "eye", "full", "full_like", "linspace", "logspace", "new_full", "new_ones", "new_zeros",
    "ones", "ones_like", "tril_indices", "triu_indices", "zeros", "zeros_like")}
MAP["flip"] = lambda x, dims: ops.flip(x, dims)
MAP |= {name: takes(lambda x, kind=kind: ops.astype(x, kind)) for name, kind in (
    ("bool", "bool"), ("byte", "uint8"), ("char", "int8"), ("double", "float64"), ("float", "float32"), ("int", "int32"),
    ("long", "int64"), ("short", "int16"))}
MAP |= {"linspace.tensor_overload": MAP["linspace"], "logspace.tensor_overload": MAP["logspace"]}
MAP |= {name: dims(getattr(ops, name)) for name in ("all", "any", "nanmean")}
MAP |= {"amax": dims(ops.max), "amin": dims(ops.min), "max.binary": ops.maximum, "min.binary": ops.minimum,
        "maximum": ops.maximum, "minimum": ops.minimum, "max.reduction_no_dim": ops.max, "min.reduction_no_dim": ops.min,
        "max.reduction_with_dim": ops.max_with_index, "min.reduction_with_dim": ops.min_with_index,
        "count_nonzero": lambda x, dim=None: ops.count_nonzero(x, dim)}
MAP |= {f"{name}{kind}": deviation(getattr(ops, name))
        for name in ("std", "var", "std_mean", "var_mean") for kind in ("", ".unbiased")}
MAP |= {"norm": norm, "norm.fro": norm, "norm.inf": norm}
MAP |= {f"special.{name}": getattr(ops, name) for name in ("entr", "erfcx", "log_ndtr", "ndtr")}
MAP |= {f"polygamma.polygamma_n_{n}": lambda x, n: ops.polygamma(n, x) for n in range(5)}
MAP |= {"special.polygamma.special_polygamma_n_0": lambda x, n: ops.polygamma(n, x)}
MAP |= {f"mvlgamma.mvlgamma_p_{p}": ops.mvlgamma for p in (1, 3, 5)}
