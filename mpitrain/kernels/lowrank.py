"""Products of a matrix and few columns, for PowerSGD: M = values + error (m, k), P (r, m) and Q (r, k), all float32.

Orders of sums are fixed, so that bits depend on no processor, and no product is fused with a sum. Expressions of NumPy define
them; native/compress.c has the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpitrain.kernels.library import CFunction, host

Host: TypeAlias = np.ndarray[Any, Any]
LANES = 16


def _sum(values: Host, error: Host | None) -> Host:
    with np.errstate(over="ignore", invalid="ignore"):
        return values if error is None else values + error


def _left(values: Host, error: Host | None, q: Host, p: Host) -> None:
    """P = (M Q')': lane l of a sum has the columns l, l + LANES, ... in order; lanes are folded in halves."""
    m, (r, k) = len(values), q.shape
    chunks = -(-k // LANES)
    padded, right = np.zeros((m, chunks * LANES), np.float32), np.zeros((r, chunks * LANES), np.float32)
    padded[:, :k], right[:, :k] = _sum(values, error), q
    lanes = np.zeros((r, m, LANES), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(0, chunks * LANES, LANES):
            lanes += padded[:, i:i + LANES] * right[:, None, i:i + LANES]
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
    p[...] = lanes[..., 0]


def _right(values: Host, error: Host | None, p: Host, q: Host) -> None:
    """Q = (M' P')': the rows of M one after the other."""
    q[...] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for row, factors in zip(_sum(values, error), p.T):
            q += row * factors[:, None]


def _product(p: Host, q: Host, values: Host) -> None:
    """values = P' Q, the columns of P one after the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        values[...] = 0
        for left, right in zip(p, q):
            values += left[:, None] * right


def _leave(values: Host, error: Host, p: Host, q: Host) -> None:
    """error = M - P' Q."""
    product = np.empty_like(error)
    _product(p, q, product)
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(values + error, product, out=error)


REFERENCE = {"lowrank_left": _left, "lowrank_right": _right, "lowrank_product": _product, "lowrank_leave": _leave}
SIGNATURES = {"lowrank_left": "F:mk F?:mk F:rk F!:rm im ik ir", "lowrank_right": "F:mk F?:mk F:rm F!:rk im ik ir",
              "lowrank_product": "F:rm F:rk F!:mk im ik ir", "lowrank_leave": "F:mk F!:mk F:rm F:rk im ik ir"}


def _of_matrix(call: CFunction, values: Host, error: Host | None, by: Host, to: Host) -> None:
    call(values, error, by, to, *values.shape, len(by))


def _to_matrix(call: CFunction, p: Host, q: Host, values: Host) -> None:
    call(p, q, values, *values.shape, len(p))


@cache
def compiled(name: str) -> Any:
    """C's function, for the arguments of the expression; None without a compiler."""
    body: Any = _to_matrix if name == "lowrank_product" else _of_matrix
    return host("lowrank", name, SIGNATURES[name])(body)()


def left(values: Host, error: Host | None, q: Host, p: Host) -> None:
    (compiled("lowrank_left") or _left)(values, error, q, p)


def right(values: Host, error: Host | None, p: Host, q: Host) -> None:
    (compiled("lowrank_right") or _right)(values, error, p, q)


def product(p: Host, q: Host, values: Host) -> None:
    (compiled("lowrank_product") or _product)(p, q, values)


def leave(values: Host, error: Host, p: Host, q: Host) -> None:
    (compiled("lowrank_leave") or _leave)(values, error, p, q)
