"""Layers whose weights are kept in few bits: linear layers and tables of rows. Letters: `M` rows, `N` outputs, `K` inputs.

A `Format` says what a float weight (N, K) becomes: arrays of whole numbers and scales, which are buffers of the layer, so they
are saved, compared and cut like any other. They are not trained. Gradients flow to the layer's input and bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module, constant
from mpitrain.errors import ConfigError, NumericsError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.basic import Embedding, Linear
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Buffer, Parameter

__all__ = ["Format", "LowBitEmbedding", "LowBitLinear"]

Arrays = Mapping[str, Array]


class Format:
    """A way to keep a weight (N, K). A subclass defines `leaves`, `quantize` and `dequantize`; `product` where it is faster.

    `calibrated`: it needs the range of the layer's inputs: its leaf "input_scale", a number, is written from outside.
    """

    calibrated: ClassVar[bool] = False
    least: ClassVar[int] = 1 << 16                # weights from which on few bits pay: fewer stay in the L2 cache as floats
    for_tables: ClassVar[bool] = True             # whether an embedding may have it, of which rows are looked up

    def leaves(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The arrays of a weight: (shape, dtype) by name. One is called "weight", and its dim 0 counts outputs."""
        raise NotImplementedError

    def quantize(self, weight: Array) -> dict[str, Array]:
        """These arrays of a weight, float32 (N, K). ShapeError where the weight cannot be kept so."""
        raise NotImplementedError

    def dequantize(self, arrays: Arrays, inputs: int) -> Array:
        """float32 (N, K): what the arrays stand for."""
        raise NotImplementedError

    def unfit(self, outputs: int, inputs: int) -> str:
        """Why a layer of this size cannot have the format; "" where it can."""
        return ""

    def product(self, x: Array, arrays: Arrays, bias: Array | None) -> Array:
        """(M, N) of x (M, K): x @ weight.T + bias."""
        y = array_module(x).matmul(x, self.dequantize(arrays, x.shape[1]).astype(x.dtype, copy=False).T)
        return y if bias is None else y + bias


class LowBitProduct(Function):
    """x @ weight.T + bias of a weight in a format."""

    floats = 2

    @staticmethod
    def forward(ctx: Context, x: Array, bias: Array | None, *, layer: LowBitLinear) -> Array:
        if x.ndim == 0 or x.shape[-1] != layer.inputs:
            raise ShapeError(f"LowBitLinear: an input of shape {x.shape} does not fit {layer.inputs} inputs")
        ctx.layer = layer
        rows = x.reshape(-1, layer.inputs) if x.size else x.reshape(int(np.prod(x.shape[:-1])), layer.inputs)
        return layer.format.product(rows, layer.arrays(), bias).reshape(*x.shape[:-1], layer.outputs)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        layer: LowBitLinear = ctx.layer
        weight = layer.format.dequantize(layer.arrays(), layer.inputs).astype(grad.dtype, copy=False)
        return (ops.matmul(grad, weight) if ctx.needs[0] else None,
                grad.reshape(-1, layer.outputs).sum(0) if ctx.needs[1] else None)


class LowBitRows(Function):
    """Rows of a table in a format, as floats, for integers (...) in [0, N). Others are refused; on a device, which is not waited
    for, they give NaN."""

    @staticmethod
    def forward(ctx: Context, indices: Array, *, layer: LowBitEmbedding) -> Array:
        flat = indices.reshape(-1)
        if ctx.xp is np:
            ops.index.check_indices("embedding", indices, layer.outputs)
        else:
            wrong = (flat < 0) | (flat >= layer.outputs)
            flat = ctx.xp.where(wrong, 0, flat)
        own = {name: array[flat] for name, array in layer.arrays().items()}
        rows = layer.format.dequantize(own, layer.inputs).astype(layer.weight.floats, copy=False)
        if ctx.xp is not np:
            rows = ctx.xp.where(wrong[:, None], constant(ctx.xp, np.array(np.nan, rows.dtype)), rows)
        return rows.reshape(*indices.shape, layer.inputs)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Any:
        return None


class Rounded(Function):
    """A weight as its format keeps it; the gradient goes straight through (Bengio et al. 2013), since no scale here clips."""

    floats = 1

    @staticmethod
    def forward(ctx: Context, weight: Array, *, format: Format) -> Array:
        kept = format.dequantize(format.quantize(weight.astype(np.float32, copy=False)), weight.shape[1])
        return kept.astype(weight.dtype, copy=False)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Any:
        return grad


class RoundedLinear(Linear):
    """`nn.Linear` whose weight is rounded to a format at each forward while its own values are trained: quantization-aware
    training. What is quantized then has the very values that were computed with."""

    format: Format

    @classmethod
    def of(cls, layer: Linear, format: Format) -> RoundedLinear:
        """A layer that takes the place of `layer`, with its parameters."""
        return cls.instead_of(layer, format=format)

    def forward(self, x: Any) -> Tensor:
        operands = self.weight.operands
        try:
            weight = Rounded.apply(self.weight, format=self.format)
        except NumericsError as error:            # its cure is that of a weight which is trained no more
            said = error.message.partition(";")[0]
            raise NumericsError(f'"{self.weight.name}", which is rounded as shrink.quantize says: {said}; set a smaller '
                                "optimizer.lr, or optimizer.clip_norm, or leave the layer out (shrink.skip)") from None
        y = ops.linear(x, weight, self.bias, self.fused, operands=operands)
        return y if self.after is None else self.after(y)


class _LowBit(Module):
    """A layer whose weight is in a format: one buffer for each array of it."""

    weight: Buffer

    def __init__(self, outputs: int, inputs: int, format: Format):
        if not isinstance(format, Format):
            raise ConfigError(f"{type(self).__name__}: format is {format!r:.40}, expected an mpitrain.nn.Format")
        if why := format.unfit(outputs, inputs):
            raise ShapeError(f"a weight of {outputs} outputs and {inputs} inputs cannot be kept so: {why}")
        self.outputs, self.inputs, self.format = outputs, inputs, format
        self.names = tuple(format.leaves(outputs, inputs))
        for name, (shape, dtype) in format.leaves(outputs, inputs).items():
            setattr(self, name, Buffer(shape, init.zeros, dtype))

    def arrays(self) -> dict[str, Array]:
        """The arrays of the weight by name."""
        own = vars(self)
        return {name: own[name].array for name in self.names}

    def dequantized(self) -> Array:
        """float32 (N, K): the weight that the layer computes with."""
        return self.format.dequantize(self.arrays(), self.inputs)


class LowBitLinear(_LowBit):
    """(..., K) to (..., N), as `nn.Linear`, with the weight in a format and the bias in floats. `fused` is the name of the
    activation that `after` is, where it has one."""

    by_position = True

    def __init__(self, outputs: int, inputs: int, format: Format, bias: Parameter | None = None, after: Module | None = None,
                 fused: str | None = None):
        super().__init__(outputs, inputs, format)
        self.bias, self.after, self.fused = bias, after, fused

    @classmethod
    def of(cls, layer: Linear, format: Format) -> LowBitLinear:
        """A layer without memory that takes the place of `layer`, and has its bias and activation."""
        outputs, inputs = layer.weight.global_shape
        after = ACTIVATIONS.resolve(layer.fused)() if layer.fused else layer.after
        return cls(outputs, inputs, format, layer.bias, after, layer.fused)

    def forward(self, x: Any) -> Tensor:
        y = LowBitProduct.apply(x, self.bias, layer=self)
        return y if self.after is None else self.after(y)


class LowBitEmbedding(_LowBit):
    """Integers (...) in [0, N) to rows (..., K), as `nn.Embedding`, of a table in a format."""

    by_position = True

    @classmethod
    def of(cls, layer: Embedding, format: Format) -> LowBitEmbedding:
        """A table without memory that takes the place of `layer`."""
        outputs, inputs = layer.weight.global_shape
        return cls(outputs, inputs, format)

    def forward(self, indices: Any) -> Tensor:
        return LowBitRows.apply(indices, layer=self)
