"""SparseLinear: a linear layer whose weight is mostly zeros, computed from what is left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, grad_enabled
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, GraphError
from mpitrain.kernels.sparse import HEIGHT, Sparse, block_product, csr_product, to_blocks, to_csr
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.basic import Linear

__all__ = ["SparseLinear"]

# Zeros from which a form is faster than a dense product, 3,072 x 768 on Zen 4 (benchmarks/sparse.py; 2026-11): blocks at half are
# 1.3 to 2.0 times as fast at 1, 16 and 64 rows; CSR at 80 % 0.9 times at 16 rows and 1.9 at 64, at 90 % 2.1 and 3.7.
LEAST_OF_BLOCKS, LEAST_OF_CSR = 0.5, 0.85
LEAST_ROWS_OF_CSR = 16


class SparseProduct(Function):
    """x (..., K) times a sparse matrix (N, K), turned, plus a bias (N,) or None."""

    floats = 1

    @staticmethod
    def forward(ctx: Context, x: Array, bias: Array | None, *, sparse: Sparse) -> Array:
        kernel = block_product if sparse.values.ndim == 2 else csr_product
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        y = kernel(rows, *sparse, None if bias is None else np.ascontiguousarray(bias))
        return y.reshape(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Any:
        raise GraphError("a sparse product is for inference; a layer whose gradient is wanted computes with its whole weight")


class SparseLinear(Linear):
    """`layer` for inference: the same parameters under the same names, and outputs that come from their numbers other than 0.

    `form` is "blocks" or "csr" (`kernels.sparse`). Whoever changes the weight makes the layer anew. Where a gradient is wanted,
    and with fewer rows than pay, it computes as `layer` does.
    """

    def __init__(self, layer: Linear, form: str):
        if not isinstance(layer, Linear) or form not in ("blocks", "csr"):
            raise ConfigError(f'SparseLinear takes a Linear and "blocks" or "csr", found {type(layer).__name__} and {form!r:.40}')
        self.fused, self.after, self.weight, self.bias = layer.fused, layer.after, layer.weight, layer.bias
        self.form = form
        w = np.ascontiguousarray(self.weight.array)
        self.sparse: Sparse = to_blocks(w) if form == "blocks" else to_csr(w)
        self.activation: Any = None if self.fused is None else ACTIVATIONS.resolve(self.fused)()

    def forward(self, x: Any) -> Tensor:
        array, weight = getattr(x, "array", x), self.weight.array
        wanted = grad_enabled() and (self.weight.requires_grad or getattr(x, "requires_grad", False))
        fits = isinstance(array, np.ndarray) and array.ndim and array.dtype == weight.dtype and array.shape[-1] == weight.shape[1]
        if wanted or not fits or (self.form == "csr" and math.prod(array.shape[:-1]) < LEAST_ROWS_OF_CSR):
            return super().forward(x)
        y: Tensor = SparseProduct.apply(x, self.bias, sparse=self.sparse)
        y = y if self.activation is None else self.activation(y)
        return y if self.after is None else self.after(y)


def form_that_pays(w: np.ndarray[Any, Any]) -> str:
    """The form in which a weight (N, K) is faster than as it is: a rule on its zeros alone; "" where there is none."""
    if w.size == 0 or w.dtype not in (np.float32, np.float64):
        return ""
    if len(w) % HEIGHT == 0 and 1 - (w.reshape(-1, HEIGHT, w.shape[1]) != 0).any(axis=1).mean() >= LEAST_OF_BLOCKS:
        return "blocks"
    return "csr" if 1 - np.count_nonzero(w) / w.size >= LEAST_OF_CSR else ""
