"""Elementwise operations, reductions, scans, sorting, indexing and shapes: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Absent

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


def division(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Absent(f"rounding_mode={rounding_mode}")
    return ops.divide(x, y)


MAP: dict[str, Callable[..., Any]] = {
    "abs": ops.absolute, "add": alpha(ops.add), "sub": alpha(ops.subtract), "mul": ops.multiply, "div.no_rounding_mode": division,
    "true_divide": division, "pow": ops.power, "neg": ops.negative, "exp": ops.exp, "log": ops.log, "sqrt": ops.sqrt,
    "eq": ops.equal, "ne": ops.not_equal, "gt": ops.greater, "ge": ops.greater_equal, "lt": ops.less, "le": ops.less_equal,
    "__radd__": lambda x, y: y + x, "__rmul__": lambda x, y: y * x, "__rdiv__": lambda x, y: y / x,
    "__rmatmul__": lambda x, y: y @ x, "matmul": ops.matmul, "mm": ops.matmul, "bmm": ops.matmul, "mv": ops.matmul,
    "sum": dims(ops.sum), "mean": dims(ops.mean), "logsumexp": dims(ops.logsumexp),
    "reshape": ops.reshape, "permute": lambda x, dims: ops.transpose(x, *dims),
    "expand": lambda x, shape: ops.broadcast_to(x, shape), "broadcast_to": ops.broadcast_to,
    "unsqueeze": ops.expand_dims, "cat": lambda xs, dim=0: ops.concatenate(xs, dim),
    "stack": ops.stack, "split": ops.split, "split.list_args": ops.split, "split_with_sizes": ops.split,
    "__getitem__": ops.getitem,
}

# The same name, and the same arguments.
SAME = """
    acos acosh asin asinh atan atanh ceil cos cosh deg2rad exp2 expm1 floor frac log10 log1p log2 rad2deg positive reciprocal
    round rsqrt sgn sign sin sinh square tan tanh trunc"""
MAP |= {name: getattr(ops, name) for name in SAME.split()}
MAP |= {f"round.{variant}": ops.round for variant in ("decimals_0", "decimals_3", "decimals_neg_3")}
