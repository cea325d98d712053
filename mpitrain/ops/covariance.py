"""Covariances and correlations of variables, a row of x each, over observations, a column each."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import is_float
from mpitrain.errors import ShapeError
from mpitrain.ops.choice import clip
from mpitrain.ops.diagonals import diagonal
from mpitrain.ops.elementwise import sqrt
from mpitrain.ops.inputs import as_array, check_number, float_tensor
from mpitrain.ops.linalg import matmul
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import expand_dims, reshape, swapaxes

__all__ = ["corrcoef", "cov"]


def cov(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """(V, V) of x (V, N), or () of one variable: mean products of deviations, with N - `correction` in place of N.

    `fweights` (N,) says how often each observation was made, `aweights` (N,) how much it counts.
    """
    x = float_tensor("cov", x)
    if x.ndim > 2 or not is_float(x.dtype):
        raise ShapeError(f"cov: the input is {x.dtype} {x.shape}, expected real numbers of shape (V, N) or (N,)")
    check_number("cov", "correction", correction)
    rows = x if x.ndim == 2 else reshape(x, 1, x.size)
    n = rows.shape[1]
    times, counts = (_weights(name, n, given, rows) for name, given in (("fweights", fweights), ("aweights", aweights)))
    weights = times * counts
    whole = float(weights.sum())
    over = whole - correction * (1.0 if aweights is None else float((weights * counts).sum()) / whole if whole else 0.0)
    if over <= 0:
        raise ShapeError(f"cov: {n} observations, which count {whole:g}, are too few for a correction of {correction}")
    gaps = rows - total(rows * weights, 1, True) / whole
    made = matmul(gaps, swapaxes(gaps * weights, 0, 1)) / over
    return reshape(made, ()) if made.size == 1 else made


def _weights(name: str, n: int, given: Any, x: Tensor) -> Any:
    weights = x.xp.ones(n, x.dtype) if given is None else as_array(given)
    if weights.shape != (n,) or weights.dtype.kind not in "biuf" or bool((weights < 0).any()):
        raise ShapeError(f"cov: {name} are {weights.dtype} {weights.shape}, expected {n} numbers of at least 0")
    return weights.astype(x.dtype)


def corrcoef(x: Any) -> Tensor:
    """(V, V) of x (V, N), or () of one variable: covariances over the deviations of both, in [-1, 1]."""
    found = cov(x)
    if not found.ndim:
        return found / found
    deviations = sqrt(diagonal(found))
    return clip(found / expand_dims(deviations, 1) / deviations, -1.0, 1.0)
