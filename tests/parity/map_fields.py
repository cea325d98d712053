"""Convolutions, pools, padding, resampling, Fourier transforms and linear algebra: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Absent

from mpitrain import ops
from mpitrain.autograd import Tensor


def norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """linalg.norm: of a vector or a matrix, as dims and ord say."""
    if dtype is not None:
        raise Absent("dtype")
    if ord is None or isinstance(dim, int) or (dim is not None and len(dim) == 1) or (dim is None and x.ndim == 1):
        return ops.vector_norm(x, 2 if ord is None else ord, dim, keepdim)
    return ops.matrix_norm(x, ord, (-2, -1) if dim is None else dim, keepdim)


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if dtype is not None:
        raise Absent("dtype")
    return ops.vector_norm(x, ord, dim, keepdim)


def matrix_norm(x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, dtype: Any = None) -> Any:
    if dtype is not None:
        raise Absent("dtype")
    return ops.matrix_norm(x, ord, dim, keepdim)


def with_info(op: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's forms that hand out a number for failure as well, which ours raise."""
    def call(a: Any, *args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
        return op(a, *args, **kwargs), Tensor(np.zeros(a.shape[:-2], np.int32))
    return call


MAP: dict[str, Callable[..., Any]] = {
    "nn.functional.conv1d": ops.conv1d, "nn.functional.conv2d": ops.conv2d, "nn.functional.conv3d": ops.conv3d,
    "nn.functional.conv_transpose1d": ops.conv_transpose1d, "nn.functional.conv_transpose2d": ops.conv_transpose2d,
    "nn.functional.conv_transpose3d": ops.conv_transpose3d,
    "nn.functional.pad.constant": ops.pad, "nn.functional.pad.reflect": ops.pad, "nn.functional.pad.replicate": ops.pad,
    "nn.functional.pad.replicate_negative": ops.pad, "nn.functional.pad.circular": ops.pad,
    "constant_pad_nd": lambda x, pad, value=0.0: ops.pad(x, pad, value=value),
    "nn.functional.interpolate.nearest": ops.interpolate, "nn.functional.interpolate.nearest-exact": ops.interpolate,
    "nn.functional.interpolate.linear": ops.interpolate, "nn.functional.interpolate.bilinear": ops.interpolate,
    "nn.functional.interpolate.bicubic": ops.interpolate, "nn.functional.interpolate.trilinear": ops.interpolate,
    "nn.functional.interpolate.area": ops.interpolate,
    **{f"nn.functional.{kind}_pool{dims}d": getattr(ops, f"{kind}_pool{dims}d") for dims in (1, 2, 3)
       for kind in ("max", "avg", "adaptive_max", "adaptive_avg")},
    **{f"nn.functional.max_unpool{dims}d{variant}": getattr(ops, f"max_unpool{dims}d") for dims in (1, 2, 3)
       for variant in ("", ".grad")},
    **{f"fft.{inverse}{kind}fft{dims}": getattr(ops, f"{inverse}{kind}fft{dims}") for inverse in ("", "i")
       for kind in ("", "r", "h") for dims in ("", "2", "n")},
    "fft.fftshift": ops.fftshift, "fft.ifftshift": ops.ifftshift,
    "complex": ops.complex, "angle": ops.angle, "real": ops.real, "conj": ops.conj,
    "conj_physical": ops.conj, "resolve_conj": lambda x: x, "resolve_neg": lambda x: x, "polar": ops.polar,
    **{name: getattr(ops, name) for name in (
        "addbmm", "addmm", "addmv", "addr", "baddbmm", "cdist", "dot", "inner", "kron", "logdet", "outer", "qr", "vdot")},
    "addmm.decomposed": ops.addmm, "cholesky": lambda a, upper=False: ops.cholesky(a, upper=upper),
    "pinverse": lambda a, rcond=1e-15: ops.pinv(a, rtol=rcond),
    "cross": lambda x, y, dim=-1: ops.cross(x, y, dim), "linalg.norm": norm, "linalg.norm.subgradients_at_zero": norm,
    "linalg.vector_norm": vector_norm, "linalg.matrix_norm": matrix_norm, "linalg.multi_dot": ops.multi_dot,
    **{f"linalg.{name}": getattr(ops, name) for name in (
        "cholesky", "cond", "cross", "det", "eigvalsh", "inv", "matrix_power", "matrix_rank", "pinv", "qr", "slogdet", "solve",
        "solve_triangular", "svdvals", "tensorinv", "tensorsolve", "vander", "vecdot")},
    "linalg.cholesky_ex": with_info(ops.cholesky), "linalg.inv_ex": with_info(ops.inv), "linalg.solve_ex": with_info(ops.solve),
    "einsum": lambda tensors, equation: ops.einsum(equation, *tensors), "tensordot": ops.tensordot,
    "nn.functional.grid_sample": ops.grid_sample,
    "nn.functional.unfold": ops.im2col,
}
