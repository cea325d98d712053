"""Rules that need whole matrices: their singular values, or means over their rows and columns.

A rank that updates a parameter has all of it, so `comm.sharding` gives each rank whole parameters, and a mesh that cuts layers
(tp, ep) is refused. The arithmetic of one parameter is the same wherever it is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels import optimizer as kernels
from mpitrain.optim.layout import Allocate
from mpitrain.optim.norm import sum_of_squares
from mpitrain.optim.optimizer import Optimizer, Run, require


class Adafactor(Optimizer):
    """Shazeer and Stern, 2018: of the squares of a matrix's gradient, running means over rows and over columns are kept.

    v = r c / mean(r);  u = g / sqrt(v);  w -= max(eps2, rms(w)) min(lr, 1 / sqrt(t)) u / max(1, rms(u) / d). Vectors keep all
    of v; of more than two dims the last two are the matrix. The means have the weight t^beta2_decay for what is new; `eps1`
    (None: the smallest that changes 1 in this precision) keeps divisors from 0. The state of a matrix is its means over rows,
    and behind them those over columns.
    """

    whole_parameters = condensed = True

    @staticmethod
    def state_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        *outer, rows, columns = shape if len(shape) > 1 else (math.prod(shape), 1, 0)
        return math.prod(outer) * (rows + columns),

    def __init__(self, model: Any, lr: float = 0.01, *, beta2_decay: float = -0.8, eps1: float | None = None, eps2: float = 1e-3,
                 d: float = 1.0, weight_decay: float = 0.0, decay: str = "all", maximize: bool = False,
                 allocate: Allocate | None = None):
        require(beta2_decay <= 0.0, "beta2_decay", beta2_decay, "0 or less")
        require(eps1 is None or eps1 >= 0.0, "eps1", eps1, "0 or more")
        require(eps2 >= 0.0, "eps2", eps2, "0 or more")
        require(d >= 1.0, "d", d, "1 or more")
        super().__init__(model, lr, state=("squares",), weight_decay=weight_decay, decay=decay, maximize=maximize,
                         allocate=allocate)
        self.beta2_decay, self.eps1, self.eps2, self.d = beta2_decay, eps1, eps2, d

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        w, kept = self.parts(run)
        xp, n = array_module(w), max(1, run.stop - run.start)
        eps = float(xp.finfo(w.dtype).eps) if self.eps1 is None else self.eps1
        g, new = gradients * scale, float(step) ** self.beta2_decay
        size = max(self.eps2, math.sqrt(sum_of_squares(w)) / math.sqrt(n)) * min(lr, 1.0 / math.sqrt(step))
        if run.decay:
            w *= 1.0 - lr * run.decay
        update = self._variance(run, kept, g * g, new, eps).reshape(-1)
        xp.maximum(update, eps * eps, out=update)
        xp.sqrt(update, out=update)
        xp.divide(g, update, out=update)
        length = math.sqrt(sum_of_squares(update)) / (math.sqrt(n) * self.d)
        w -= size / max(1.0, length) * update

    def _variance(self, run: Run, kept: Array, squares: Array, new: float, eps: float) -> Array:
        """The running mean of the gradient's squares, of a matrix as its means over rows and columns tell it; a new array."""
        if len(run.shape) < 2:
            kept += new * (squares - kept)
            return kept.copy()
        *outer, rows, columns = run.shape
        xp, n = array_module(kept), math.prod(outer)
        squares = squares.reshape(n, rows, columns)
        by_row, by_column = kept[:n * rows].reshape(n, rows, 1), kept[n * rows:].reshape(n, 1, columns)
        by_row += new * (squares.mean(axis=2, keepdims=True) - by_row)
        by_column += new * (squares.mean(axis=1, keepdims=True) - by_column)
        found: Array = by_row * by_column
        found /= xp.maximum(by_row.mean(axis=1, keepdims=True), eps)
        return found


class Muon(Optimizer):
    """Matrices step along the orthogonal factor of their momentum (Jordan et al., 2024); all others by AdamW's rule.

    m = momentum m + (1 - momentum) g;  u = m, or with `nesterov` (1 - momentum) g + momentum m;
    w -= lr (c orthogonal(u) + decay w).
    `ns_steps` steps of Newton and Schulz with `ns_coefficients` bring the singular values of u near 1, in the parameters' own
    precision. `adjust_lr_fn` gives c: "original", sqrt(max(1, rows / columns)); "match_rms_adamw", 0.2 sqrt(max(rows, columns)),
    with which rates of AdamW fit. AdamW's rule, with `betas` and `adamw_eps`, is for parameters of other than two dims, and
    where `orthogonal` is false: in a group for embeddings and the last layer, as its authors advise.
    """

    whole_parameters = True

    def __init__(self, model: Any, lr: float = 1e-3, *, momentum: float = 0.95, nesterov: bool = True, weight_decay: float = 0.1,
                 ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315), ns_steps: int = 5, eps: float = 1e-7,
                 adjust_lr_fn: str = "original", betas: Sequence[float] = (0.9, 0.999), adamw_eps: float = 1e-8,
                 orthogonal: bool = True, decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        require(0.0 <= momentum < 1.0, "momentum", momentum, "in [0, 1)")
        require(len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), "betas", list(betas), "two numbers in [0, 1)")
        require(len(ns_coefficients) == 3, "ns_coefficients", list(ns_coefficients), "three numbers")
        require(0 <= ns_steps < 100, "ns_steps", ns_steps, "at least 0, and less than 100")
        require(adjust_lr_fn in ADJUST, "adjust_lr_fn", f'"{adjust_lr_fn}"', " or ".join(f'"{name}"' for name in ADJUST))
        super().__init__(model, lr, state=("m", "v"), weight_decay=weight_decay, decay=decay, maximize=maximize,
                         allocate=allocate)
        self.momentum, self.nesterov, self.eps, self.adjust = momentum, nesterov, eps, ADJUST[adjust_lr_fn]
        self.ns_coefficients, self.ns_steps, self.orthogonal = tuple(ns_coefficients), ns_steps, orthogonal
        self.betas, self.adamw_eps = (betas[0], betas[1]), adamw_eps

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        w, m, v = self.parts(run)
        if len(run.shape) != 2 or not self.orthogonal:
            beta1, beta2 = self.betas
            kernels.adam(w, gradients, m, v, lr / (1.0 - beta1 ** step), 1.0 - lr * run.decay, 0.0, 1.0 - beta1, beta2,
                         1.0 - beta2, 1.0 / math.sqrt(1.0 - beta2 ** step), self.adamw_eps, scale)
            return
        g = gradients * scale
        m += (1.0 - self.momentum) * (g - m)
        update = g + self.momentum * (m - g) if self.nesterov else m.copy()
        if run.decay:
            w *= 1.0 - lr * run.decay
        w -= lr * self.adjust(*run.shape) * self.orthogonalised(update.reshape(run.shape)).reshape(-1)

    def orthogonalised(self, x: Array) -> Array:
        """About U V^T, for x = U S V^T (Bernstein and Newhouse, 2024): x = a x + (b A + c A A) x, A = x x^T, from |x| = 1."""
        a, b, c = self.ns_coefficients
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / max(math.sqrt(sum_of_squares(x.reshape(-1))), self.eps)
        for _ in range(self.ns_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x.T if tall else x


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / max(1, columns)))


def _as_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


ADJUST = {"original": _original, "match_rms_adamw": _as_adamw}
