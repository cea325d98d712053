"""Linear layers whose weights are mostly zeros: SparseLinear for inference, BlockLinear in training.

Products and gradients have the bits of the dense ones of `kernels.product`, for finite numbers: only zeros are left out. So it is
a matter of speed alone which layers are replaced.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Context, Function, Tensor, grad_enabled
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, GraphError
from mpitrain.kernels import linear as layers
from mpitrain.kernels import sparse as kernels
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.sparse import HEIGHT, Sparse, block_product, csr_product, live_blocks, starts_of, to_blocks, to_csr
from mpitrain.kernels.sums import sum_rows
from mpitrain.nn.basic import Linear
from mpitrain.ops.linalg import room_for

__all__ = ["SparseLinear"]

# Zeros from which a form is faster than a dense product, 3,072 x 768 on Zen 5 (benchmarks/sparse.py; 2026-11): blocks at half are
# 1.6 to 2.6 times as fast at 1, 16 and 64 rows; CSR at 80 % 1.0 times at 16 rows and 1.8 at 64, at 90 % 1.8 and 3.3. Smaller
# weights are in the cache, and with 8 rows their dense products are NumPy's, which has other bits.
LEAST_OF_BLOCKS, LEAST_OF_CSR = 0.5, 0.85
LEAST_ROWS_OF_CSR = 16
LEAST_SIZE = 1 << 17


class SparseProduct(Function):
    """a(x w' + b) for x (..., K), a sparse matrix w (N, K) and a bias (N,) or None."""

    floats = 1

    @staticmethod
    def forward(ctx: Context, x: Array, bias: Array | None, *, sparse: Sparse, activation: str | None) -> Array:
        kernel = block_product if sparse.values.ndim == 2 else csr_product
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        y = kernel(rows, *sparse, None if bias is None else np.ascontiguousarray(bias))
        if activation is not None:
            y = ACTIVATIONS[activation].forward(y, ours=True, training=False)[0]
        made: Array = y.reshape(*x.shape[:-1], y.shape[1])
        return made

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Any:
        raise GraphError("a sparse product is for inference; a layer whose gradient is wanted computes with its whole weight")


class SparseLinear(Linear):
    """`layer` for inference: the same parameters under the same names, and outputs that come from their numbers other than 0.

    `form` is "blocks" or "csr" (`kernels.sparse`). Where a gradient is wanted, and with fewer rows than pay, it computes as
    `layer` does.
    """

    def __init__(self, layer: Linear, form: str):
        if not isinstance(layer, Linear) or form not in ("blocks", "csr"):
            raise ConfigError(f'SparseLinear takes a Linear and "blocks" or "csr", found {type(layer).__name__} and {form!r:.40}')
        vars(self).update(vars(layer))
        self.form = form
        self._made = -1
        self.sparse = self._sparse()

    def _sparse(self) -> Sparse:
        """The weight as it is: made anew where it has changed."""
        version = self.weight.shared_version().count
        if version != self._made:
            w = np.ascontiguousarray(self.weight.array)
            self.sparse, self._made = to_blocks(w) if self.form == "blocks" else to_csr(w), version
        return self.sparse

    def forward(self, x: Any) -> Tensor:
        array, weight = getattr(x, "array", x), self.weight.array
        wanted = grad_enabled() and (self.weight.requires_grad or getattr(x, "requires_grad", False))
        fits = isinstance(array, np.ndarray) and array.ndim and array.dtype == weight.dtype and array.shape[-1] == weight.shape[1]
        if wanted or not fits or (self.form == "csr" and math.prod(array.shape[:-1]) < LEAST_ROWS_OF_CSR):
            return super().forward(x)
        y: Tensor = SparseProduct.apply(x, self.bias, sparse=self._sparse(), activation=self.fused)
        return y if self.after is None else self.after(y)


class Blocks(NamedTuple):
    """Where a weight (N, K) has blocks of 16 rows and a column: marks (N / 16, K), and the same as `kernels.sparse` takes it."""

    live: Array
    starts: Array
    columns: Array

    @classmethod
    def of(cls, live: Array) -> Blocks:
        return cls(live, starts_of(live), np.nonzero(live)[1].astype(np.int32))

    def clear(self, by_weight: Array) -> None:
        """Zeros where there are no blocks."""
        by_weight.reshape(len(self.live), HEIGHT, -1).swapaxes(0, 1)[:, ~self.live] = 0


class BlockProduct(Function):
    """`ops.linear` by a weight whose blocks are fixed; its gradient is zero outside of them, and is not computed there.

    Where the dense products are ours, and the format of `operands` is none, products by blocks have their bits; elsewhere these
    are computed, and what lies outside of blocks is cleared.
    """

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, blocks: Blocks, activation: str | None,
                operands: str = "") -> Array:
        rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 and x.size and x.shape[-1] == weight.shape[1] else None
        fused = None if activation is None else ACTIVATIONS[activation]
        ctx.blocks, ctx.values = blocks, None
        if rows is None or not layers.suits(rows, weight, fused, operands) or bias is not None and bias.shape != weight.shape[:1]:
            return ops.linalg.Linear.forward(ctx, x, weight, bias, activation=activation, operands=operands)
        ctx.activation, ctx.name, ctx.operands, ctx.before = fused, activation, operands, None
        ctx.values = kernels.block_values(weight, blocks.starts, blocks.columns)
        made = kernels.block_product(rows, blocks.starts, blocks.columns, ctx.values,
                                     None if bias is None else np.ascontiguousarray(bias))
        if fused is None:
            ctx.save(x, weight)
            return made.reshape(*x.shape[:-1], len(weight))
        made, kept = fused.forward(made, ours=True, training=True in ctx.needs)
        result: Array = made.reshape(*x.shape[:-1], len(weight))
        ctx.save(x, weight, result) if kept is made else ctx.save(x, weight, kept, bias)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        blocks = ctx.blocks
        if ctx.values is None:
            by_x, by_weight, by_bias = ops.linalg.Linear.backward(ctx, grad)
            if by_weight is not None:
                blocks.clear(by_weight)
            return by_x, by_weight, by_bias
        x, weight, *kept = ctx.saved
        flat, by_x, by_weight, by_bias = np.ascontiguousarray(grad).reshape(-1, len(weight)), None, None, None
        if kept:
            if ctx.before is None:                    # the second half of a split backward finds them made
                sums = room_for(ctx, 2, flat.shape[1:], flat.dtype) if ctx.wanted[2] else None
                ctx.before = ctx.activation.gradient(kept[0].reshape(flat.shape), flat, sums), sums
            flat, by_bias = ctx.before
        elif ctx.needs[2]:
            by_bias = sum_rows(flat, ctx.out(2))
        if ctx.needs[0]:
            by_x = kernels.block_input_gradient(flat, blocks.starts, blocks.columns, ctx.values, x.shape[-1]).reshape(x.shape)
        if ctx.needs[1]:
            out = room_for(ctx, 1, weight.shape, flat.dtype)
            there = out if out.flags.carray and out.dtype == flat.dtype else np.empty(weight.shape, flat.dtype)
            by_weight = kernels.block_weight_gradient(flat, x.reshape(-1, x.shape[-1]), blocks.starts, blocks.columns, there)
            if there is not out:
                out[...] = there
                by_weight = out
        return by_x, by_weight, by_bias

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_x, by_weight, by_bias = ops.linalg.Linear.derivative(ctx, grad)
        if by_weight is not None:
            by_weight = by_weight * np.repeat(ctx.blocks.live, HEIGHT, axis=0).astype(grad.dtype)
        return by_x, by_weight, by_bias


class BlockLinear(Linear):
    """`layer` in training, its weight 0 but in `blocks`, which stay: products and gradients are of these alone."""

    blocks: Blocks

    @classmethod
    def of(cls, layer: Linear, blocks: Blocks) -> BlockLinear:
        """A layer that takes the place of `layer`, with its parameters."""
        return cls.instead_of(layer, blocks=blocks)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = BlockProduct.apply(x, self.weight, self.bias, blocks=self.blocks, activation=self.fused,
                                       operands=self.weight.operands)
        return y if self.after is None else self.after(y)


def blocks_pay(live: Array, least: int = LEAST_SIZE) -> bool:
    """Whether products by a weight with these blocks, marks (N / 16, K), are faster than dense ones: by shape and zeros alone."""
    return live.size * HEIGHT >= max(1, least) and 1 - float(live.mean()) >= LEAST_OF_BLOCKS


def form_that_pays(w: np.ndarray[Any, Any], least: int = LEAST_SIZE) -> str:
    """The form in which a weight (N, K) is faster than as it is: a rule on its shape and zeros alone; "" where there is none, and
    where it has fewer than `least` elements."""
    if w.size < max(1, least) or w.dtype not in (np.float32, np.float64):
        return ""
    if len(w) % HEIGHT == 0 and blocks_pay(live_blocks(w), least):
        return "blocks"
    return "csr" if 1 - np.count_nonzero(w) / w.size >= LEAST_OF_CSR else ""
